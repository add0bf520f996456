"""The specification of K and V in 8-bit floats and in bfloat16."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference import SMALLEST_SCALE, dequantise_rows, quantise_rows_fp8
from chatkv.kernels.reference_attention import SequenceSpan, kv_write, paged_attention


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_rows_come_back_within_half_a_step_of_e4m3() -> None:
    numbers = rows(5, 3, 64) * torch.logspace(-20, 20, 5).view(5, 1, 1)
    quanta, scales = quantise_rows_fp8(numbers)
    assert quanta.dtype == torch.uint8
    assert scales.shape == (5, 3)
    largest = numbers.abs().amax(-1, keepdim=True)
    error = (dequantise_rows(quanta, scales) - numbers).abs()
    # 3 bits behind the leading one; below 2^-6 of 448 parts, steps of 2^-9 of them.
    assert (error <= torch.maximum(numbers.abs() / 16, largest / 448 / 1024) * 1.001).all()


def test_the_largest_number_of_a_row_is_448_of_its_scales() -> None:
    numbers = rows(4, 32)
    quanta, _ = quantise_rows_fp8(numbers)
    places = numbers.abs().argmax(-1, keepdim=True)
    assert (quanta.gather(1, places) & 0x7F).unique().tolist() == [0x7E]


def test_rows_of_zeros_are_safe() -> None:
    quanta, scales = quantise_rows_fp8(torch.zeros(2, 16))
    assert scales.tolist() == [SMALLEST_SCALE] * 2
    assert not dequantise_rows(quanta, scales).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_reads_a_row_that_is_not_finite_is_not_finite(bad: float) -> None:
    numbers = rows(3, 16)
    numbers[1, 4] = bad
    read = dequantise_rows(*quantise_rows_fp8(numbers))
    assert read.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_attention_reads_what_was_written(dtype: torch.dtype) -> None:
    shape = (3, 1, 2, 16)
    pools = [torch.zeros(*shape, 32, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(shape) for _ in range(2)] if dtype == torch.uint8 else [None, None]
    kv, exact = KVBlocks(*pools, *scales), KVBlocks(torch.zeros(*shape, 32), torch.zeros(*shape, 32))
    table, num_rows = [2, 0], 20
    slots = torch.tensor([table[position // 16] * 16 + position % 16 for position in range(num_rows)])
    keys, values, queries = rows(num_rows, 2, 32), rows(num_rows, 2, 32).flip(0), rows(num_rows, 4, 32)
    spans = [SequenceSpan(num_rows, 0, table)]
    for blocks in (kv, exact):
        kv_write(blocks, 0, keys, values, slots)
    got, expected = (paged_attention(queries, blocks, 0, spans, 32**-0.5) for blocks in (kv, exact))
    error = (got - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < {torch.bfloat16: 0.01, torch.uint8: 0.06}[dtype], "near, and not the same numbers"
