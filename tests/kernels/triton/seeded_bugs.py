"""Bugs put into the kernels, each with a test that must fail: whether the tests notice what they are for.

`python -m tests.kernels.triton.seeded_bugs NAME` runs the test of one bug against the changed kernel, in a process of
its own: a changed copy of the file is imported in the file's place, and nothing on disk changes.
"""
# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]
KERNELS = ROOT / "kernels" / "triton"


class SeededBug(NamedTuple):
    name: str
    file: str
    """In kernels/triton/."""
    original: str
    """Occurs once in the file."""
    changed: str
    test: str
    """In this folder: a file, or a file and a test. In the quick lane."""

    @property
    def source(self) -> str:
        """Of the file with the bug. Raises ValueError where the file has moved on from the table."""
        text = (KERNELS / self.file).read_text()
        if text.count(self.original) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.original!r} {text.count(self.original)} times")
        return text.replace(self.original, self.changed)


SEEDED_BUGS: tuple[SeededBug, ...] = (
    SeededBug("norm-mean-over-padding", "norm.py", "axis=0) / num_columns", "axis=0) / width", "test_norm.py"),
    SeededBug("norm-eps-outside", "norm.py", "/ num_columns + eps)", "/ num_columns) + eps", "test_norm.py"),
    SeededBug("add-in-16-bits", "norm.py", "hidden + product.to(tl.float32)", "hidden.to(product.dtype) + product", "test_norm.py"),
    SeededBug("norm-store-unmasked", "norm.py", "tl.store(hidden_ptr + row + columns, hidden, mask=is_inside)", "tl.store(hidden_ptr + row + columns, hidden)", "test_norm.py"),
    SeededBug("rope-padded-row-stored", "rope.py", "if slot >= 0:", "if slot >= -1:", "test_rope.py"),
    SeededBug("rope-wrong-turn", "rope.py", "second * cos + first * sin", "second * cos - first * sin", "test_rope.py"),
    SeededBug("rope-turns-twice", "rope.py", "first = turned", "first = turned * cos - second * sin", "test_rope.py"),
    SeededBug("rope-values-turned-too", "rope.py", "if not is_value:", "if index >= 0:", "test_rope.py"),
    SeededBug("rope-mean-of-half", "rope.py", "axis=1) / (2 * half)", "axis=1) / half", "test_rope.py"),
    SeededBug("kv-wrong-scale-stride", "rope.py", "scale_target + head * scale_head_stride", "scale_target + head", "test_rope.py"),
    SeededBug("kv-wrong-layer", "rope.py", "layer * kv.keys.stride(1)", "0 * kv.keys.stride(1)", "test_rope.py"),
    SeededBug("kv-heads-past-the-last", "rope.py", "is_head = head < tl.where(is_query, num_heads, num_kv_heads)", "is_head = head < num_heads", "test_rope.py"),
    SeededBug("kv-offsets-in-32-bits", "rope.py", "block = slot // block_size", "block = (slot // block_size).to(tl.int32)", "test_rope.py"),
    SeededBug("kv-largest-drops-nan", "bits.py", "tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)", "tl.maximum(scale, SMALLEST_SCALE)", "test_rope.py"),
    SeededBug("e4m3-ties-away", "bits.py", "bits + 0x0007FFFF + ((bits >> 20) & 1)", "bits + 0x00080000", "test_bits.py"),
    SeededBug("e4m3-does-not-saturate", "bits.py", "magnitude >= 448.0", "magnitude >= 512.0", "test_bits.py"),
    SeededBug("up-is-gate", "activation.py", "tl.load(source + num_columns, mask", "tl.load(source, mask", "test_activation.py"),
    SeededBug("gelu-without-cube", "activation.py", "0.044715 * gate * gate * gate", "0.044715 * gate * gate", "test_activation.py"),
    SeededBug("embed-nibble-order", "embedding.py", "(columns % 2) * 16", "(columns % 2) * 4", "test_embedding.py"),
    SeededBug("embed-group-of-32", "embedding.py", "groups = token * (num_columns // group_size) + columns // group_size\n    numbers", "groups = token * (num_columns // group_size) + columns // 32\n    numbers", "test_embedding.py"),
    SeededBug("gather-from-the-slab", "transfer.py", "tl.load(pool_ptr + block * block_words + words)", "tl.load(pool_ptr + image * block_words + words)", "test_transfer.py"),
    SeededBug("zero-offsets-in-32-bits", "transfer.py", "tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)", "tl.load(block_ids_ptr + tl.program_id(0))", "test_transfer.py"),
    SeededBug("sample-target-not-in-the-tile", "sampling.py", "beyond = target - tl.sum(tl.where(is_picked, ends - tile_mass, 0), axis=0)", "beyond = target", "test_sampling.py"),
    SeededBug("sample-ties-of-each-tile", "sampling.py", "num_at_border - (tl.cumsum(count, axis=0) - count)", "num_at_border - (count - count)", "test_sampling.py"),
    SeededBug("sample-one-tie-too-many", "sampling.py", "index_at_border < num_kept_here", "index_at_border <= num_kept_here", "test_sampling.py::test_ids_at_the_border_lie_among_better_ones"),
    SeededBug("sample-tiles-in-own-units", "sampling.py", "tl.exp2(-distances(tile_bests, best, scale))", "tl.exp2(-distances(tile_bests, best, 0.0))", "test_sampling.py"),
    SeededBug("top-p-of-all-not-of-top-k", "sampling_filters.py", "total = tl.load(at + MASS_KEPT)", "total = tl.sum(sums, axis=0)", "test_sampling.py"),
    SeededBug("top-k-forgets-what-is-nearer", "sampling_filters.py", "num_before + tl.cumsum(counts, axis=0) >= num_wanted", "tl.cumsum(counts, axis=0) >= num_wanted", "test_sampling.py"),
    SeededBug("mask-of-nothing-bans-all", "sampling_rows.py", "start += NUM_TILES", "start += 0", "test_sampling.py::test_a_mask_that_leaves_nothing_is_no_mask"),
    SeededBug("logprob-order-of-negatives", "logprobs.py", "order = bits ^ ((bits >> 31) & 0x7FFFFFFF)\n    return", "order = bits\n    return", "test_sampling.py::test_logprobs_are_those_of_the_model"),
    SeededBug("halves-twice-the-low-one", "weight_bits.py", "(bits >> 16).to(tl.int16)", "bits.to(tl.int16)", "test_linear_int4.py"),
    SeededBug("int8-without-sign", "weight_bits.py", "(shifted & 0x00800080) | ones", "(shifted & 0x00000000) | ones", "test_linear_int8.py"),
    SeededBug("fp8-sign-of-the-neighbour", "weight_bits.py", "signs = shifted & -0x7FFF8000", "signs = words & -0x7FFF8000", "test_linear_fp8.py"),
    SeededBug("int4-scales-of-the-first-step", "linear_int4.py", "        scales = next_scales\n", "", "test_linear_int4.py"),
    SeededBug("int4-minimum-of-zero-not-eight", "linear_int4.py", "+ 8.0 * scales.to", "+ 7.0 * scales.to", "test_linear_int4.py"),
    SeededBug("int4-sums-begin-elsewhere", "linear_int4.py", "even * 16.5 + odd * 1.5", "even * 16.5 + odd * 1.0", "test_linear_int4.py"),
    SeededBug("int4-words-before-halves", "linear_int4.py", "(0, 1, 4, 5, 2, 3)", "(0, 1, 4, 5, 3, 2)", "test_linear_int4.py"),
    SeededBug("tail-unmasked", "gemm_tiles.py", "num_blocks % self.blocks != 0", "False", "test_linear_int8.py"),
    SeededBug("w8a8-scale-of-the-first-row", "linear_w8a8.py", "tl.load(x_scales_ptr + rows,", "tl.load(x_scales_ptr + rows * 0,", "test_linear_fp8.py"),
    SeededBug("gemm-same-row-tiles-again", "gemm_tiles.py", "first_row_tile + program % programs_together", "program % programs_together", "test_linear.py::test_more_row_tiles_than_share_weights"),
    SeededBug("deterministic-one-row-alone", "linear.py", "len(x) == 1 and not is_deterministic", "len(x) == 1", "test_linear.py::test_deterministic_rows_do_not_depend_on_others"),
    SeededBug("decode-no-mask", "attention_decode.py", "(positions >= first_seen) & (positions < end)", "positions >= first_seen", "test_attention_decode.py::test_every_group"),
    SeededBug("decode-split-one-too-long", "attention_decode.py", "tl.minimum((split + 1) * SPLIT, length)", "tl.minimum((split + 1) * SPLIT + 1, length)", "test_attention_decode.py::test_around_the_border_of_a_split"),
    SeededBug("decode-last-split-left-out", "attention_decode.py", "(splits < end_split)", "(splits < end_split - 1)", "test_attention_decode.py::test_around_the_border_of_a_split"),
    SeededBug("decode-window-one-too-wide", "attention_decode.py", "first_seen = tl.maximum(length - window, 0)", "first_seen = tl.maximum(length - window - 1, 0)", "test_attention_decode.py::test_window_and_soft_cap"),
    SeededBug("decode-parts-not-weighted", "attention_decode.py", "tl.sum(part * weights[:, None], axis=0)", "tl.sum(part, axis=0)", "test_attention_decode.py::test_around_the_border_of_a_split"),
    SeededBug("chunk-does-not-see-itself", "attention_chunk.py", "positions[None, :] <= row_positions[:, None]", "positions[None, :] < row_positions[:, None]", "test_attention_chunk.py::test_every_group"),
    SeededBug("chunk-window-one-too-wide", "attention_chunk.py", "> row_positions[:, None] - window", ">= row_positions[:, None] - window", "test_attention_chunk.py::test_window_and_soft_cap"),
    SeededBug("chunk-whole-tile-too-many", "attention_chunk.py", "(first_position + 1) // NUM_KEYS * NUM_KEYS", "tl.cdiv(first_position + 1, NUM_KEYS) * NUM_KEYS", "test_attention_chunk.py::test_every_group"),
    SeededBug("chunk-nan-spreads", "attention_chunk.py", "value = tl.where(is_bad[:, None], 0.0, value)", "value = value", "test_attention_chunk.py::test_what_is_not_finite_reaches_only_rows_that_see_it"),
    SeededBug("chunk-rows-of-the-next-sequence", "attention_chunk.py", "(rows < end_row)", "(rows < num_rows)", "test_attention_chunk.py::test_mixed_batch_in_every_dtype"),
    SeededBug("attention-total-not-shrunk", "kv_load.py", "total = total * shrink + tl.sum", "total = total + tl.sum", "test_attention_decode.py::test_every_dtype"),
    SeededBug("attention-hidden-scale", "kv_load.py", "weights = tl.where(is_seen, weights, 0.0)", "weights = weights", "test_attention_chunk.py::test_what_is_not_finite_reaches_only_rows_that_see_it"),
    SeededBug("attention-unit-of-scales-left-out", "kv_load.py", "scores + tl.log2(tl.maximum(value_scales, SMALLEST_UNIT))[None, :]", "scores", "test_attention_decode.py::test_scales_of_any_size"),
)  # fmt: skip
"""One bug a line."""


class ChangedFile(MetaPathFinder):
    """Imports `module` from `path`."""

    def __init__(self, module: str, path: Path) -> None:
        self.module = module
        self.path = path
        self.is_used = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        self.is_used = True
        return spec_from_file_location(fullname, self.path)


def run_test_against(bug: SeededBug) -> int:
    """Exit status of pytest: 1 where a test failed, as it should."""
    os.environ["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / bug.file
        path.write_text(bug.source)
        finder = ChangedFile(f"chatkv.kernels.triton.{path.stem}", path)
        sys.meta_path.insert(0, finder)
        status = pytest.main(["-x", "--tb=line", "-p", "no:cacheprovider", str(TESTS / bug.test)])
        if not finder.is_used:
            raise ValueError(f"{bug.name}: {bug.test} does not use {bug.file}")
        return status


if __name__ == "__main__":
    sys.exit(run_test_against(next(bug for bug in SEEDED_BUGS if bug.name == sys.argv[1])))
