"""Chunk attention gives what the reference gives, and the same bits however a prompt is cut and whoever runs beside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.triton.attention_chunk import paged_chunk
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

MIXED = [(0, 1), (0, 37), (0, 0), (90, 2), (130, 1)]
"""A first token, a prompt, a sequence without rows, a short chunk behind a prefix, a decode."""


def run(
    case: AttentionCase,
    window: int | None = None,
    soft_cap: float | None = None,
    tables: Tensor | None = None,
    is_deterministic: bool = False,
) -> Tensor:
    return paged_chunk(
        case.queries,
        case.kv,
        LAYER,
        case.tables if tables is None else tables,
        case.cu_rows,
        case.starts,
        case.max_rows,
        case.scale,
        window,
        soft_cap,
        is_deterministic=is_deterministic,
    )


@pytest.mark.parametrize(("kv_name", "compute"), ALL_DTYPES)
def test_mixed_batch_in_every_dtype(kv_name: str, compute: torch.dtype) -> None:
    case = attention_case(MIXED, kv_name, compute, group=3, num_kv_heads=1)
    assert_near(run(case), case.expected(), compute)


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("kv_name", ["fp16", "int8"])
def test_every_head_size(head_dim: int, kv_name: str) -> None:
    case = attention_case([(60, 20), (3, 1)], kv_name, torch.float16, head_dim, num_kv_heads=1)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("num_rows", [1, 23])
def test_every_group(group: int, num_rows: int) -> None:
    """A group that does not divide the rows of the matrix product leaves some of them empty."""
    case = attention_case([(5, num_rows), (40, 1)], group=group)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.parametrize("kv_name", ["bf16", "fp8"])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (20, None), (70, None), (150, 1.5), (None, 1.5)])
def test_window_and_soft_cap(kv_name: str, window: int | None, soft_cap: float | None) -> None:
    case = attention_case([(190, 40), (0, 5), (140, 1)], kv_name, torch.bfloat16, num_kv_heads=1)
    assert_near(run(case, window, soft_cap), case.expected(window, soft_cap), torch.bfloat16)


def test_tiles_that_a_window_hides_are_not_even_looked_up() -> None:
    case = attention_case([(300, 20)], num_kv_heads=1)
    tables = case.tables
    tables[0, : (300 - 50 + 1) // 128 * 128 // BLOCK_SIZE] = NO_BLOCK
    assert_near(run(case, window=50, tables=tables), case.expected(window=50), torch.float16)


@pytest.mark.parametrize("num_extra_rows", [1, 70])
def test_rows_behind_the_last_sequence_are_zeros(num_extra_rows: int) -> None:
    case = attention_case([(0, 30), (0, 0), (8, 1)], num_kv_heads=1, num_extra_rows=num_extra_rows)
    found = run(case)
    assert_near(found[:31], case.expected(), torch.float16)
    assert torch.equal(found[31:], torch.zeros_like(found[31:]))


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix units treat all rows of a product alike. numpy's libraries sum a row in another order in another place:
    in float64 that does not show."""
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda left, right: matmul(left.astype(np.float64), right.astype(np.float64)))


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kv_name", KV_NAMES)
def test_bits_do_not_depend_on_where_a_prompt_is_cut(kv_name: str, window: int | None) -> None:
    whole = run(attention_case([(0, 100)], kv_name, num_kv_heads=1), window, is_deterministic=True)
    for first in (1, 22, 64, 99):
        # The second chunk of a sequence may run beside the first one of another.
        chunks = attention_case([(first, 100 - first), (0, first)], kv_name, num_kv_heads=1, seeds=[0, 0])
        found = run(chunks, window, is_deterministic=True)
        assert torch.equal(found[chunks.rows_of(0)], whole[first:])
        assert torch.equal(found[chunks.rows_of(1)], whole[:first])


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize("kv_name", KV_NAMES)
def test_bits_depend_neither_on_neighbours_nor_on_the_width_of_the_table(kv_name: str) -> None:
    case = attention_case(MIXED, kv_name, num_kv_heads=1)
    found = run(case)
    assert torch.equal(run(case, tables=case.tables_of_width(50)), found)
    for sequence in (1, 3):
        span = MIXED[sequence]
        alone = run(attention_case([span], kv_name, num_kv_heads=1, seeds=[sequence]), is_deterministic=True)
        assert torch.equal(alone, found[case.rows_of(sequence)])


@pytest.mark.parametrize("kv_name", KV_NAMES)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("position", [10, 75])
def test_what_is_not_finite_reaches_only_rows_that_see_it(kv_name: str, part: str, position: int) -> None:
    """Position 75 is in the chunk itself: rows before it share its tile of keys."""
    spans = [(70, 20), (0, 12)]
    healthy = run(attention_case(spans, kv_name))
    case = attention_case(spans, kv_name)
    poison(case, 0, position, part)
    found = run(case)
    first = max(0, position - 70)
    assert torch.equal(found[:first], healthy[:first])
    assert not found[first:20, :2].isfinite().all(-1).any()
    assert torch.equal(found[first:20, 2:], healthy[first:20, 2:])
    assert torch.equal(found[20:], healthy[20:])


@pytest.mark.parametrize("kv_name", ["fp16", "int8"])
def test_a_window_leaves_behind_what_is_not_finite(kv_name: str) -> None:
    healthy = run(attention_case([(70, 20)], kv_name), window=8)
    case = attention_case([(70, 20)], kv_name)
    poison(case, 0, 73, "values")
    found = run(case, window=8)
    is_seen = (torch.arange(70, 90) >= 73) & (torch.arange(70, 90) < 73 + 8)
    assert torch.equal(found[~is_seen], healthy[~is_seen])
    assert not found[is_seen][:, :2].isfinite().all(-1).any()


def test_a_query_that_is_not_finite_spoils_its_own_head_alone() -> None:
    case = attention_case([(20, 10)], group=4)
    healthy = run(case)
    case.queries[4, 1, 5] = math.nan
    found = run(case)
    assert found[4, 1].isnan().all()
    healthy[4, 1], found[4, 1] = 0, 0
    assert torch.equal(found, healthy)


def test_blocks_beyond_2_to_the_31_numbers() -> None:
    layout = KVLayout(LAYER + 1, 2, 64, "fp16")
    num_blocks = (1 << 32) // layout.block_bytes + 2
    pool = sparse_bytes(num_blocks, layout.block_bytes)
    case = attention_case([(10, 20)], pool=pool, block_ids=[num_blocks - 1, 0])
    assert_near(run(case), case.expected(), torch.float16)


def test_more_sequences_than_are_searched_at_once() -> None:
    case = attention_case([(3 * i % 7, 1 + i % 2) for i in range(40)], group=1, num_kv_heads=1)
    assert_near(run(case), case.expected(), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize(("kv_name", "compute"), ALL_DTYPES)
def test_all_together(kv_name: str, compute: torch.dtype, group: int, head_dim: int) -> None:
    case = attention_case([(0, 1), (57, 20), (40, 1)], kv_name, compute, head_dim, group, num_kv_heads=1)
    window, soft_cap = (30, 2.0) if group % 2 else (None, None)
    assert_near(run(case, window, soft_cap), case.expected(window, soft_cap), compute)
