"""A model on the native kernels: one call a step."""

from __future__ import annotations

import ctypes
import logging
import weakref
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...executor import StepResult, StepRows
from ...kv_blocks import KeyOrder, KVBlocks
from ...program import Program
from ...reference_attention import SequenceSpan
from ...weights import TiledWeight
from .abi import KEY_TILE, TILE, KvFormat, Pool, Span, Step
from .angles import AngleTable
from .buffers import MAX_SELECTED_ROWS, StepBuffers
from .build import NoCompilerError
from .digest import digest_of, fixed_program
from .library import VARIANT_NAMES, NativeLibrary, NativeThreads, native_library
from .lowering import lower, why_unsuitable

logger = logging.getLogger(__name__)
PLAIN_VARIANT = "scalar"
"""Says what the others compute. Measured: torch decodes 5 times as fast, and reads a prompt 70 times as fast."""
KV_FORMATS = {torch.float16: KvFormat.FP16, torch.int8: KvFormat.INT8}


def native_executor(program: Program, num_threads: int) -> NativeModel | str:
    """`program` on native kernels, or for people why not."""
    reason = why_unsuitable(program) or why_none_here()
    return reason or NativeModel(program, native_library(), num_threads)


def why_none_here() -> str | None:
    """Why this machine runs no native kernels, for people; None: it does. They may be compiled for that, once."""
    try:
        library = native_library()
    except NoCompilerError as error:
        logger.warning("the native kernels cannot be had: %s", error)
        return str(error).splitlines()[0]
    if library.variants[0] == PLAIN_VARIANT:
        return "native kernels need AVX2, or NEON with dot products, which this processor lacks"
    return None


class NativeModel:
    """Implements `kernels.executor.Executor`. For one caller at a time."""

    device = torch.device("cpu")
    kv_dtypes = ("fp16", "int8")
    keys_by: KeyOrder = "dimension"
    _end_threads: weakref.finalize[..., NativeModel] | None = None

    def __init__(self, program: Program, library: NativeLibrary, num_threads: int, variant: str | None = None) -> None:
        """variant: an instruction set of `library.variants`; the best when None. It changes no bit."""
        self._library = library
        self._variant = variant or library.variants[0]
        self._library = library
        self.set_num_threads(num_threads)
        self._lowered = lower(program)
        self._vocab_size = program.vocab_size
        self._step = Step(num_heads=program.num_heads, scale=program.scale)
        self._buffers = StepBuffers(program, self._step)
        self._angles = AngleTable(program.inverse_frequencies.numpy(), program.attention_factor)
        self._kv: KVBlocks | None = None
        self.weight_bytes = sum(w.tiles.numel() for w in program.matrices if isinstance(w, TiledWeight))

    @property
    def description(self) -> str:
        num_threads = self._threads.num_threads
        return f"native {VARIANT_NAMES[self._variant]}, {num_threads} thread{'s' if num_threads > 1 else ''}"

    def set_num_threads(self, num_threads: int) -> None:
        threads = NativeThreads(self._library, num_threads)
        # Not at the end of the process: a daemon thread may be in the middle of a step then.
        ending = weakref.finalize(self, threads.close)
        ending.atexit = False
        if self._end_threads is not None:
            self._end_threads()
        self._threads, self._end_threads = threads, ending

    def numerics(self) -> dict[str, str | int]:
        """No instruction set: all give the same bits."""
        return {
            "backend": "cpu-native",
            "key_tile": KEY_TILE,
            "compute_dtype": "float32",
            "activation_quantisation": "g32-symmetric: int16 (127 x 254) after norms, else int8",
            "arithmetic": _arithmetic_digest(self._library, self._variant),
        }

    def run(self, rows: StepRows, kv: KVBlocks) -> StepResult:
        if kv is not self._kv:
            self._use_pool(kv)
        self._fill_rows(rows, len(kv.keys) * TILE)
        # Both must live until the last operation has run.
        spans, block_ids = self._spans(rows.spans, len(kv.keys))
        self._step.spans, self._step.num_spans = spans, len(spans)
        selected = rows.selected
        logits = self._run(selected[:MAX_SELECTED_ROWS], is_first=True)
        if len(selected) > MAX_SELECTED_ROWS:
            turns = range(MAX_SELECTED_ROWS, len(selected), MAX_SELECTED_ROWS)
            later = (self._run(selected[first : first + MAX_SELECTED_ROWS], is_first=False) for first in turns)
            logits = torch.cat([logits.clone(), *(part.clone() for part in later)])
        del spans, block_ids
        return StepResult(logits, self._buffers.is_finite[: len(rows.token_ids)])

    def timed_run(self, rows: StepRows, kv: KVBlocks) -> list[int]:
        """Nanoseconds that each of the program's operations took in `run`."""
        times = (ctypes.c_int64 * self._lowered.num_ops)()
        self._step.op_ns = ctypes.addressof(times)
        try:
            self.run(rows, kv)
        finally:
            self._step.op_ns = None
        return list(times)

    def _run(self, selected: Sequence[int], *, is_first: bool) -> Tensor:
        """All operations, or those behind the layers again, for other rows -> logits of the rows `selected`."""
        step, lowered, num_selected = self._step, self._lowered, len(selected)
        first = 0 if is_first else lowered.num_layer_ops
        end = lowered.num_ops if num_selected else lowered.num_layer_ops + 1
        step.ops, step.num_ops, step.num_selected = lowered.ops_from(first), end - first, num_selected
        self._buffers.selected[:num_selected] = selected
        self._threads.run(step, self._variant)
        return self._buffers.logits[:num_selected]

    def _fill_rows(self, rows: StepRows, num_slots: int) -> None:
        num_rows = len(rows.token_ids)
        buffers = self._buffers
        buffers.ensure(num_rows)
        self._step.num_rows = num_rows
        token_ids = buffers.token_ids[:num_rows]
        token_ids[:] = rows.token_ids
        # The kernels trust what they are given.
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise IndexError(f"a token id is not within 0 .. {self._vocab_size - 1}")
        buffers.slots[:num_rows] = rows.slots
        assert buffers.slots[:num_rows].max() < num_slots, "a slot is not in the pool"
        positions = np.empty(num_rows, np.int64)
        row = 0
        for span in rows.spans:
            if span.num_rows == 1:
                positions[row] = span.start_position
            else:
                positions[row : row + span.num_rows] = np.arange(span.start_position, span.end_position)
            row += span.num_rows
        assert row == num_rows, f"{num_rows} rows, {row} in spans"
        end = max(span.end_position for span in rows.spans)
        self._angles.look_up(positions, end, buffers.cos[:num_rows], buffers.sin[:num_rows])

    @staticmethod
    def _spans(spans: Sequence[SequenceSpan], num_blocks: int) -> tuple[ctypes.Array[Span], array[int]]:
        """The structs, and the block ids that they point into."""
        block_ids = array("i")
        for span in spans:
            assert len(span.block_table) * TILE >= span.end_position, "a block table is too short"
            block_ids.extend(span.block_table)
        ids = np.frombuffer(block_ids, np.int32)
        assert ids.min() >= 0, "a block is not in the pool"
        assert ids.max() < num_blocks, "a block is not in the pool"
        address, row = block_ids.buffer_info()[0], 0
        structs = (Span * len(spans))()
        for struct, span in zip(structs, spans, strict=True):
            struct.block_table, struct.first_row = address, row
            struct.num_rows, struct.start_position = span.num_rows, span.start_position
            address += len(span.block_table) * block_ids.itemsize
            row += span.num_rows
        return structs, block_ids

    def _use_pool(self, kv: KVBlocks) -> None:
        """`kv`: as `engine.kv_layout` lays keys out by dimension."""
        _, num_layers, num_kv_heads, block_size, head_dim = kv.keys.shape
        per_head = block_size * head_dim
        assert block_size == TILE, f"blocks of {block_size} positions"
        assert _lies(kv.keys, (2 * num_kv_heads * per_head, per_head, 1, block_size)), "not keys by dimension"
        assert _lies(kv.values, (2 * num_kv_heads * per_head, per_head, head_dim, 1)), "not values by position"
        assert kv.values.data_ptr() - kv.keys.data_ptr() == num_kv_heads * per_head * kv.keys.itemsize
        if kv.key_scales is not None:
            assert _lies(kv.key_scales, (2 * num_kv_heads * block_size, block_size, 1)), "not scales by position"
            assert kv.key_scales.stride(0) * kv.key_scales.itemsize == kv.keys.stride(0) * kv.keys.itemsize
        start = kv.keys.data_ptr()
        self._step.pool = Pool(
            data=start,
            block_bytes=kv.keys.stride(0) * kv.keys.itemsize,
            scales_offset=0 if kv.key_scales is None else kv.key_scales.data_ptr() - start,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            format=KV_FORMATS[kv.keys.dtype],
        )
        self._kv = kv


@cache
def _arithmetic_digest(library: NativeLibrary, variant: str) -> str:
    model = NativeModel(fixed_program(), library, 1, variant)
    return digest_of(lambda rows, kv: model.run(rows, kv).logits)


def _lies(view: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a block is laid out so. Where there is one of something, its stride means nothing."""
    found = zip(view.shape[1:], view.stride()[1:], strides, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in found)
