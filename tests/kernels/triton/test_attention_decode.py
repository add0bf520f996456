"""Decode attention gives what the reference gives, and the same bits in any company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.triton import attention_decode
from chatkv.kernels.triton.attention_decode import SPLIT_TOKENS, paged_decode
from tests.kernels.triton.attention_case import (
    ALL_DTYPES,
    KV_NAMES,
    LAYER,
    NO_BLOCK,
    AttentionCase,
    attention_case,
    poison,
)
from tests.kernels.triton.numbers import BLOCK_SIZE, HEAD_SIZES, assert_near, sparse_bytes


def decode_case(lengths: list[int], *args: object, **options: object) -> AttentionCase:
    return attention_case([(length - 1, 1) for length in lengths], *args, **options)  # type: ignore[arg-type]


def run(case: AttentionCase, window: int | None = None, soft_cap: float | None = None, **options: int) -> Tensor:
    return paged_decode(
        case.queries, case.kv, LAYER, case.tables, case.lengths, case.scale, window, soft_cap, **options
    )


@pytest.mark.parametrize(("kv_name", "compute"), ALL_DTYPES)
def test_every_dtype(kv_name: str, compute: torch.dtype) -> None:
    case = decode_case([1, 37, SPLIT_TOKENS + 18], kv_name, compute, group=3)
    assert_near(run(case), case.expected(), compute)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("kv_name", ["fp16", "int8"])
def test_every_head_size(head_dim: int, kv_name: str) -> None:
    case = decode_case([16, 70], kv_name, torch.float16, head_dim, num_kv_heads=1)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group(group: int) -> None:
    case = decode_case([20], group=group)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1025])
def test_around_the_border_of_a_split(length: int) -> None:
    case = decode_case([length], num_kv_heads=1)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.parametrize("kv_name", ["bf16", "fp8"])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (70, None), (600, 1.5), (None, 1.5)])
def test_window_and_soft_cap(kv_name: str, window: int | None, soft_cap: float | None) -> None:
    case = decode_case([40, 540], kv_name, torch.bfloat16, num_kv_heads=1)
    assert_near(run(case, window, soft_cap), case.expected(window, soft_cap), torch.bfloat16)


def test_what_a_window_hides_is_not_even_looked_up() -> None:
    case = decode_case([3 * SPLIT_TOKENS + 5], num_kv_heads=1)
    expected = case.expected(window=40)
    tables = case.tables
    tables[0, : (3 * SPLIT_TOKENS - 40) // BLOCK_SIZE] = NO_BLOCK
    found = paged_decode(case.queries, case.kv, LAYER, tables, case.lengths, case.scale, window=40)
    assert_near(found, expected, torch.float16)


def test_padding_gives_zeros() -> None:
    case = decode_case([33, 20, 90])
    lengths = case.lengths
    lengths[1] = 0
    case.queries[1] = math.nan
    tables = case.tables
    tables[1] = NO_BLOCK
    found = paged_decode(case.queries, case.kv, LAYER, tables, lengths, case.scale)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert torch.equal(found[[0, 2]], run(case)[[0, 2]])


@pytest.mark.parametrize("kv_name", KV_NAMES)
def test_bits_depend_neither_on_neighbours_nor_on_the_width_of_the_table(kv_name: str) -> None:
    together = decode_case([5, 600, 64], kv_name)
    found = run(together)
    alone = decode_case([600], kv_name, seeds=[1])
    assert torch.equal(run(alone)[0], found[1])
    wide = together.tables_of_width(5 * SPLIT_TOKENS // BLOCK_SIZE)
    assert torch.equal(
        paged_decode(together.queries, together.kv, LAYER, wide, together.lengths, together.scale), found
    )


def test_more_splits_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "COMBINED_SPLITS", 2)
    case = decode_case([4 * SPLIT_TOKENS + 20], num_kv_heads=1)
    assert_near(run(case), case.expected(), torch.float16)
    window = 2 * SPLIT_TOKENS
    assert_near(run(case, window), case.expected(window), torch.float16)


def test_bits_do_not_depend_on_the_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = decode_case([3 * SPLIT_TOKENS + 5, 30], num_kv_heads=1)
    found = run(case)
    assert torch.equal(run(case, max_splits=4), found)
    monkeypatch.setattr(attention_decode, "MAX_PROGRAMS", 1)
    assert torch.equal(run(case), found)


@pytest.mark.parametrize("kv_name", KV_NAMES)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_not_finite_reaches_only_who_sees_it(kv_name: str, part: str) -> None:
    case = decode_case([100, 50], kv_name, group=2)
    healthy = run(case)
    poison(case, 0, 60, part)
    found = run(case)
    assert not found[0, :2].isfinite().all(-1).any()
    assert torch.equal(found[0, 2:], healthy[0, 2:])
    assert torch.equal(found[1], healthy[1])
    assert torch.equal(run(case, window=39), run(decode_case([100, 50], kv_name, group=2), window=39))


def test_a_query_that_is_not_finite_spoils_its_own_head_alone() -> None:
    case = decode_case([100, 50], group=4)
    healthy = run(case)
    case.queries[0, 1, 5] = math.nan
    found = run(case)
    assert found[0, 1].isnan().all()
    is_other = torch.arange(8) != 1
    assert torch.equal(found[0, is_other], healthy[0, is_other])
    assert torch.equal(found[1], healthy[1])


@pytest.mark.parametrize(
    ("compute", "factor"),
    [(torch.float16, 2e-5), (torch.float16, 5e3), (torch.bfloat16, 1e-12), (torch.bfloat16, 1e12)],
)
def test_scales_of_any_size(compute: torch.dtype, factor: float) -> None:
    """Values of 8 bits enter the matrix units without their scales, which float16 could not hold."""
    case = decode_case([70], "int8", compute)
    expected = case.expected() * factor
    assert case.kv.value_scales is not None
    case.kv.value_scales.mul_(factor)
    assert_near(run(case), expected, compute)


def test_values_of_zeros() -> None:
    case = decode_case([40], "int8")
    assert case.kv.value_scales is not None
    case.kv.value_scales.fill_(torch.finfo(torch.float32).tiny)
    case.kv.values.zero_()
    assert torch.equal(run(case), torch.zeros_like(run(case)))


def test_blocks_beyond_2_to_the_31_numbers() -> None:
    layout = KVLayout(LAYER + 1, 2, 64, "fp16")
    num_blocks = (1 << 32) // layout.block_bytes + 2
    pool = sparse_bytes(num_blocks, layout.block_bytes)
    case = decode_case([30], pool=pool, block_ids=[num_blocks - 1, 0])
    assert_near(run(case), case.expected(), torch.float16)


def test_no_rows() -> None:
    case = decode_case([30])
    assert paged_decode(case.queries[:0], case.kv, LAYER, case.tables[:0], case.lengths[:0], 1.0).shape == (0, 4, 64)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize(("kv_name", "compute"), ALL_DTYPES)
def test_all_together(kv_name: str, compute: torch.dtype, group: int, head_dim: int) -> None:
    case = decode_case([1, 35, SPLIT_TOKENS + 3], kv_name, compute, head_dim, group, num_kv_heads=1)
    window, soft_cap = (50, 2.0) if group % 2 else (None, None)
    assert_near(run(case, window, soft_cap), case.expected(window, soft_cap), compute)
