"""Native attention: as the reference computes it, and the same bits however rows, keys and threads are shared out."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from chatkv.kernels.cpu.native.abi import TILE
from chatkv.kernels.reference_attention import SequenceSpan, paged_attention
from tests.kernels.native.native_pool import NativePool, attend
from tests.kernels.native.one_op import other_variants, same_bits

DTYPES = (torch.float16, torch.int8)


class Case(NamedTuple):
    """Sequences in layer 1 of a pool of two; each ends where its rows end."""

    pool: NativePool
    queries: Tensor
    """float32 [T, num_heads, head_dim]"""
    spans: list[SequenceSpan]


def make_case(
    rows_and_starts: list[tuple[int, int]],
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(rows + start) // TILE) for rows, start in rows_and_starts]
    shuffled = torch.randperm(sum(num_blocks) + 1, generator=generator)[1:].tolist()
    pool = NativePool(len(shuffled) + 1, 2, num_kv_heads, head_dim, dtype)
    spans = []
    for (num_rows, start), count in zip(rows_and_starts, num_blocks, strict=True):
        table, shuffled = shuffled[:count], shuffled[count:]
        keys, values = torch.randn(2, start + num_rows, num_kv_heads, head_dim, generator=generator)
        pool.write(1, table, keys, values)
        spans.append(SequenceSpan(num_rows, start, table))
    num_rows = sum(rows for rows, _ in rows_and_starts)
    scale = 2 / math.sqrt(head_dim)
    queries = torch.randn(num_rows, group * num_kv_heads, head_dim, generator=generator) * scale
    return Case(pool, queries, spans)


def run(case: Case, window: int | None = None, variant: str | None = None, num_threads: int = 1) -> Tensor:
    return attend(case.queries, case.pool, case.spans, 1, window, variant, num_threads)


RAGGED = [(1, 0), (1, 40), (5, 0), (17, 16), (40, 100), (2, 127), (3, 126), (1, 128), (70, 250)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 100, 128, 5000])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_rows_of_ragged_sequences_agree_with_the_reference(dtype: torch.dtype, window: int | None, group: int) -> None:
    case = make_case(RAGGED, group, dtype=dtype)
    expected = paged_attention(case.queries, case.pool.blocks, 1, case.spans, 1.0, window)
    torch.testing.assert_close(run(case, window), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
def test_any_multiple_of_16_is_a_head_dim(dtype: torch.dtype, head_dim: int) -> None:
    case = make_case([(3, 130), (1, 500), (20, 0)], 5, 1, head_dim, dtype)
    expected = paged_attention(case.queries, case.pool.blocks, 1, case.spans, 1.0)
    torch.testing.assert_close(run(case), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_long_context_agrees_with_the_reference(num_threads: int) -> None:
    """Large scores too: maxima differ much from tile to tile."""
    case = make_case([(2, 1998)])
    case.queries.mul_(4)
    expected = paged_attention(case.queries, case.pool.blocks, 1, case.spans, 1.0)
    torch.testing.assert_close(run(case, num_threads=num_threads), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 60, 200])
def test_variants_give_the_bits_of_scalar(dtype: torch.dtype, window: int | None) -> None:
    case = make_case([*RAGGED, (300, 5)], dtype=dtype)
    expected = run(case, window, "scalar")
    for variant in other_variants():
        assert same_bits(run(case, window, variant), expected)


@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7])
def test_variants_agree_for_any_number_of_queries_together(head_dim: int, group: int) -> None:
    case = make_case([(1, 300)], group, 1, head_dim)
    expected = run(case, variant="scalar")
    for variant in other_variants():
        assert same_bits(run(case, variant=variant), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 90])
def test_rows_have_the_same_bits_alone_in_chunks_and_together(
    dtype: torch.dtype, group: int, window: int | None
) -> None:
    case = make_case([(300, 37)], group, dtype=dtype)
    table = case.spans[0].block_table
    together = run(case, window)
    bounds = [0, 1, 17, 91, 92, 200, 300]
    pieces = [*itertools.pairwise(bounds), *((row, row + 1) for row in range(0, 300, 23))]
    for begin, end in pieces:
        piece = case._replace(
            queries=case.queries[begin:end],
            spans=[SequenceSpan(end - begin, 37 + begin, table[: (36 + end) // 16 + 1])],
        )
        assert same_bits(run(piece, window), together[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 200, 1000])
@pytest.mark.parametrize(("num_rows", "start"), [(1, 1999), (1, 257), (4, 326), (3, 383), (4, 1150)])
def test_keys_shared_between_threads_give_the_bits_of_one_thread(
    dtype: torch.dtype, window: int | None, num_rows: int, start: int
) -> None:
    """With four threads, few rows of few sequences are computed in parts, one for each tile of keys."""
    case = make_case([(num_rows, start)], dtype=dtype)
    expected = run(case, window)
    for variant in (*other_variants(), "scalar"):
        assert same_bits(run(case, window, variant, num_threads=4), expected)


def test_a_sequence_has_the_same_bits_whatever_is_in_the_batch() -> None:
    case = make_case(RAGGED)
    together, first = run(case, num_threads=2), 0
    for span in case.spans:
        queries = case.queries[first : first + span.num_rows]
        alone = run(case._replace(queries=queries, spans=[span]))
        assert same_bits(alone, together[first : first + span.num_rows])
        first += span.num_rows


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("position", [0, 130, 299])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them_alone(
    number: float, part: str, dtype: torch.dtype, window: int | None, position: int
) -> None:
    case = make_case([(300, 0)], dtype=dtype)
    case.queries.abs_()  # so that a key of -inf, whose weight is 0, is a case of its own
    before = run(case, window)
    block, offset = case.spans[0].block_table[position // TILE], position % TILE
    numbers, scales = (
        (case.pool.blocks.keys, case.pool.blocks.key_scales)
        if part == "keys"
        else (case.pool.blocks.values, case.pool.blocks.value_scales)
    )
    if scales is None:
        numbers[block, 1, 1, offset, 3] = number
    else:
        numbers[block, 1, 1, offset] = 0  # as they are stored
        scales[block, 1, 1, offset] = math.nan
    after = run(case, window)
    sees = torch.zeros(300, 6, dtype=torch.bool)
    sees[position : None if window is None else position + window, 3:] = True
    assert same_bits(after[~sees], before[~sees])
    if part == "keys" and number == -math.inf and dtype == torch.float16:
        assert not same_bits(after[sees], before[sees])
    else:
        assert not bool(after[sees].isfinite().all(-1).any())
    for variant in other_variants():
        assert same_bits(run(case, window, variant), run(case, window, "scalar"))


def test_a_query_that_is_not_finite_spoils_its_own_output_alone() -> None:
    case = make_case([(100, 100)])
    before = run(case)
    case.queries[20, 4, 7] = math.nan
    case.queries[30, 2, 0] = math.inf
    after = run(case)
    is_spoilt = torch.zeros(100, 6, dtype=torch.bool)
    is_spoilt[20, 4] = is_spoilt[30, 2] = True
    assert bool(after[is_spoilt].isnan().all())
    assert same_bits(after[~is_spoilt], before[~is_spoilt])


def test_scores_far_below_the_largest_have_no_weight() -> None:
    """exp underflows to exactly 0: the output is the value of the one key that is seen."""
    case = make_case([(1, 400)])
    case.queries.fill_(1)
    keys = torch.full((401, 2, 32), -10.0)
    keys[250] = 10.0
    values = torch.randn(401, 2, 32, generator=torch.Generator().manual_seed(1)).half().float()
    case.pool.write(1, case.spans[0].block_table, keys, values)
    assert torch.equal(run(case)[0], values[250].repeat_interleave(3, dim=0))
