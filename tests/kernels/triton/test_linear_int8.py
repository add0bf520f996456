"""Products with int8 matrices against the specification in float64."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.triton.linear_int8 import int8_gemm, int8_gemv
from chatkv.kernels.triton.matrices import Int8Matrix, to_device
from chatkv.kernels.weights import Int8Weight
from tests.kernels.triton.numbers import COMPUTE_DTYPES, assert_near, random
from tests.kernels.triton.random_weights import GROUP_SIZES, exact_product, random_int8

NUM_OUTPUTS = 70
"""No multiple of a tile's."""
ROW_COUNTS = [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow), 33]


def matrix_of(weight: Int8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Int8Matrix:
    matrix = to_device([weight], bias, "cpu", dtype)
    assert isinstance(matrix, Int8Matrix)
    return matrix


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_many_rows(group_size: int, dtype: torch.dtype, num_rows: int) -> None:
    weight, bias = random_int8(NUM_OUTPUTS, 384, group_size), random(NUM_OUTPUTS, seed=4)
    x = random(num_rows, 384, seed=5, dtype=dtype)
    out = torch.full((num_rows, NUM_OUTPUTS), torch.nan)
    assert_near(int8_gemm(x, matrix_of(weight, bias, dtype), out), exact_product(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_one_row(group_size: int, dtype: torch.dtype) -> None:
    weight, bias = random_int8(NUM_OUTPUTS, 1152, group_size), random(NUM_OUTPUTS, seed=4)
    x = random(1, 1152, seed=5, dtype=dtype)
    out = torch.full((1, NUM_OUTPUTS), torch.nan)
    found = int8_gemv(x, matrix_of(weight, bias, dtype), out)
    assert_near(found, exact_product(x, weight, bias), torch.float32)


@pytest.mark.parametrize("num_columns", [32, 96, 160])
def test_columns_that_fill_no_tile(num_columns: int) -> None:
    weight = random_int8(5, num_columns, 32, dtype=torch.float32)
    x = random(3, num_columns, seed=5, dtype=torch.float16)
    matrix, expected = matrix_of(weight, None, torch.float16), exact_product(x, weight)
    assert_near(int8_gemm(x, matrix, torch.full((3, 5), torch.nan)), expected, torch.float16)
    assert_near(int8_gemv(x[:1], matrix, torch.full((1, 5), torch.nan)), expected[:1], torch.float32)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_every_quantum_is_exact(dtype: torch.dtype) -> None:
    """The product with a unit row is the weight: all 256 bytes, at all four places of a word."""
    quanta = (torch.arange(1024) // 4).view(32, 1, 32).to(torch.uint8).view(torch.int8)
    weight = Int8Weight(quanta.roll(1, 0).contiguous(), torch.ones(32, 1).half())
    weight.quanta[:, :, 1::2] = weight.quanta[:, :, 1::2].flip(0)
    matrix = matrix_of(weight, None, dtype)
    expected = exact_product(torch.eye(32), weight)
    found = int8_gemm(torch.eye(32).to(dtype), matrix, torch.empty(32, 32))
    assert torch.equal(found.double(), expected)
    for column in range(4):
        found = int8_gemv(torch.eye(32).to(dtype)[column : column + 1], matrix, torch.empty(1, 32))
        assert torch.equal(found.double(), expected[column : column + 1])
