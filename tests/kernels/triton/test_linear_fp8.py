"""Products with fp8 matrices against the specification in float64."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.triton.linear_fp8 import fp8_gemm, fp8_gemv
from chatkv.kernels.triton.linear_w8a8 import quantise_fp8, w8a8_gemm
from chatkv.kernels.triton.matrices import Fp8Matrix, to_device
from chatkv.kernels.weights import Fp8Weight
from tests.kernels.triton.numbers import COMPUTE_DTYPES, assert_near, random
from tests.kernels.triton.random_weights import exact_product, random_fp8

NUM_OUTPUTS = 70
"""No multiple of a tile's."""
ROW_COUNTS = [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow), 33]


def matrix_of(weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Fp8Matrix:
    matrix = to_device([weight], bias, "cpu", dtype)
    assert isinstance(matrix, Fp8Matrix)
    return matrix


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("is_native", [False, True])
def test_many_rows(is_native: bool, dtype: torch.dtype, num_rows: int) -> None:
    """Weights are exact in both 16-bit floats, so that only sums are rounded."""
    weight, bias = random_fp8(NUM_OUTPUTS, 160), random(NUM_OUTPUTS, seed=4)
    x = random(num_rows, 160, seed=5, dtype=dtype)
    out = torch.full((num_rows, NUM_OUTPUTS), torch.nan)
    found = fp8_gemm(x, matrix_of(weight, bias, dtype), out, is_native=is_native)
    assert_near(found, exact_product(x, weight, bias), torch.float32)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("num_columns", [32, 160, 1152])
def test_one_row(num_columns: int, dtype: torch.dtype) -> None:
    weight, bias = random_fp8(NUM_OUTPUTS, num_columns), random(NUM_OUTPUTS, seed=4)
    x = random(1, num_columns, seed=5, dtype=dtype)
    found = fp8_gemv(x, matrix_of(weight, bias, dtype), torch.full((1, NUM_OUTPUTS), torch.nan))
    assert_near(found, exact_product(x, weight, bias), torch.float32)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_every_byte_is_exact(dtype: torch.dtype) -> None:
    """The product with a unit row is the weight, at all four places of a word."""
    values = torch.arange(256, dtype=torch.uint8).view(8, 32)
    values[values & 0x7F == 0x7F] ^= 1
    weight = Fp8Weight(torch.cat([values.roll(shift, 1) for shift in range(4)]), torch.ones(32))
    matrix, expected = matrix_of(weight, None, dtype), exact_product(torch.eye(32), weight)
    found = fp8_gemm(torch.eye(32).to(dtype), matrix, torch.empty(32, 32), is_native=False)
    assert torch.equal(found.double(), expected)
    for column in range(4):
        found = fp8_gemv(torch.eye(32).to(dtype)[column : column + 1], matrix, torch.empty(1, 32))
        assert torch.equal(found.double(), expected[column : column + 1])


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_rows_in_fp8(dtype: torch.dtype) -> None:
    x = random(7, 96, seed=5, dtype=dtype) * torch.tensor([1, 100, 0.01, 0, 1, 1, 1], dtype=dtype).unsqueeze(1)
    numbers, scales = quantise_fp8(x)
    torch.testing.assert_close(scales, (x.float().abs().amax(1) / 448).clamp_min(torch.finfo(torch.float32).tiny))
    expected = (x.float() / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
    assert torch.equal(numbers.view(torch.float8_e4m3fn).float(), expected.float())


@pytest.mark.parametrize("num_rows", [5, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_both_in_fp8(dtype: torch.dtype, num_rows: int) -> None:
    weight, bias = random_fp8(NUM_OUTPUTS, 160), random(NUM_OUTPUTS, seed=4)
    x = random(num_rows, 160, seed=5, dtype=dtype) * torch.linspace(1, 3, num_rows, dtype=dtype).unsqueeze(1)
    found = w8a8_gemm(x, matrix_of(weight, bias, dtype), torch.full((num_rows, NUM_OUTPUTS), torch.nan))
    numbers, scales = quantise_fp8(x)
    rounded = numbers.view(torch.float8_e4m3fn).double() * scales.double().unsqueeze(1)
    assert_near(found, exact_product(rounded, weight, bias), torch.float32)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_in_fp8_that_is_not_finite_stays_alone(poison: float) -> None:
    weight = random_fp8(9, 64)
    matrix = matrix_of(weight, None, torch.float16)
    x = random(4, 64, seed=5, dtype=torch.float16)
    clean = w8a8_gemm(x, matrix, torch.empty(4, 9))
    x[2, 7] = poison
    found = w8a8_gemm(x, matrix, torch.empty(4, 9))
    assert not found[2].isfinite().any()
    others = [0, 1, 3]
    assert torch.equal(found[others], clean[others])
