"""Products with int4 matrices against the specification in float64."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.triton.linear_int4 import int4_gemm, int4_gemv
from chatkv.kernels.triton.matrices import Int4Matrix, to_device
from tests.kernels.triton.numbers import COMPUTE_DTYPES, assert_near, random
from tests.kernels.triton.random_weights import GROUP_SIZES, exact_product, random_int4

NUM_OUTPUTS = 70
"""No multiple of a tile's."""
ROW_COUNTS = [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow), 33]


def matrix_of(weight: object, bias: torch.Tensor | None, dtype: torch.dtype) -> Int4Matrix:
    matrix = to_device([weight], bias, "cpu", dtype)  # type: ignore[list-item]
    assert isinstance(matrix, Int4Matrix)
    return matrix


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_many_rows(group_size: int, has_minimums: bool, dtype: torch.dtype, num_rows: int) -> None:
    weight, bias = random_int4(NUM_OUTPUTS, 384, group_size, has_minimums), random(NUM_OUTPUTS, seed=4)
    x = random(num_rows, 384, seed=5, dtype=dtype)
    out = torch.full((num_rows, NUM_OUTPUTS), torch.nan)
    assert_near(int4_gemm(x, matrix_of(weight, bias, dtype), out), exact_product(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_one_row(group_size: int, has_minimums: bool, dtype: torch.dtype) -> None:
    weight, bias = random_int4(NUM_OUTPUTS, 1152, group_size, has_minimums), random(NUM_OUTPUTS, seed=4)
    x = random(1, 1152, seed=5, dtype=dtype)
    out = torch.full((1, NUM_OUTPUTS), torch.nan)
    found = int4_gemv(x, matrix_of(weight, bias, dtype), out)
    assert_near(found, exact_product(x, weight, bias), torch.float32)


@pytest.mark.parametrize("num_columns", [32, 96, 160, 4096 + 32])
def test_columns_that_fill_no_tile(num_columns: int) -> None:
    weight = random_int4(5, num_columns, 32, has_minimums=True)
    x = random(3, num_columns, seed=5, dtype=torch.float16)
    matrix, expected = matrix_of(weight, None, torch.float16), exact_product(x, weight)
    assert_near(int4_gemm(x, matrix, torch.full((3, 5), torch.nan)), expected, torch.float16)
    assert_near(int4_gemv(x[:1], matrix, torch.full((1, 5), torch.nan)), expected[:1], torch.float32)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_scales_that_float16_cannot_hold(dtype: torch.dtype) -> None:
    """Of float32, small enough for float16's products to lose bits."""
    weight = random_int4(40, 128, 64, has_minimums=True, dtype=torch.float32)
    x = random(2, 128, seed=5, dtype=dtype)
    matrix, expected = matrix_of(weight, None, dtype), exact_product(x, weight)
    assert matrix.scales.dtype == torch.float32
    assert_near(int4_gemm(x, matrix, torch.full((2, 40), torch.nan)), expected, dtype)
    assert_near(int4_gemv(x[1:], matrix, torch.full((1, 40), torch.nan)), expected[1:], torch.float32)


def test_every_quantum_is_exact() -> None:
    """Columns one by one: the product with a unit row is the weight."""
    weight = random_int4(16, 64, 32)
    weight.scales.fill_(1.0)
    matrix = matrix_of(weight, None, torch.bfloat16)
    expected = exact_product(torch.eye(64), weight)
    found = int4_gemm(torch.eye(64).bfloat16(), matrix, torch.empty(64, 16))
    assert torch.equal(found.double(), expected)
    for column in (0, 1, 8, 18, 31, 63):
        row = torch.eye(64).half()[column : column + 1]
        found = int4_gemv(row, matrix, torch.empty(1, 16))
        assert torch.equal(found.double(), expected[column : column + 1])
