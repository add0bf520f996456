"""Which kernel computes a product, and what holds for all of them."""

from __future__ import annotations

import pytest
import torch

from chatkv.kernels.tile_layout import tile
from chatkv.kernels.triton.gemm_tiles import gemm_tile
from chatkv.kernels.triton.linear import linear
from chatkv.kernels.triton.matrices import DeviceMatrix, FpMatrix, Int4Matrix, SideBySide, to_device
from chatkv.kernels.weights import Weight
from tests.kernels.triton.numbers import COMPUTE_DTYPES, assert_near, random
from tests.kernels.triton.random_weights import exact_product, random_fp, random_fp8, random_int4, random_int8

NUM_OUTPUTS, NUM_COLUMNS = 40, 192
WEIGHTS: dict[str, Weight] = {
    "fp": random_fp(NUM_OUTPUTS, NUM_COLUMNS, torch.float16),
    "fp8": random_fp8(NUM_OUTPUTS, NUM_COLUMNS),
    "int8": random_int8(NUM_OUTPUTS, NUM_COLUMNS, 64),
    "int4": random_int4(NUM_OUTPUTS, NUM_COLUMNS, 32),
    "int4-affine": random_int4(NUM_OUTPUTS, NUM_COLUMNS, 64, has_minimums=True),
}
FORMATS = list(WEIGHTS)


def matrix_of(name: str, dtype: torch.dtype = torch.float16) -> DeviceMatrix:
    return to_device([WEIGHTS[name]], random(NUM_OUTPUTS, seed=4), "cpu", dtype)


def rows(num_rows: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return random(num_rows, NUM_COLUMNS, seed=5, dtype=dtype)


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_product(name: str, dtype: torch.dtype, num_rows: int) -> None:
    x = rows(num_rows, dtype)
    found = linear(x, matrix_of(name, dtype))
    assert found.dtype == dtype
    assert_near(found, exact_product(x, WEIGHTS[name], random(NUM_OUTPUTS, seed=4)), dtype)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_float32(name: str, num_rows: int) -> None:
    found = linear(rows(num_rows), matrix_of(name), out_dtype=torch.float32)
    assert found.dtype == torch.float32
    rounded = found.half().float()
    assert not torch.equal(found, rounded)
    torch.testing.assert_close(rounded, linear(rows(num_rows), matrix_of(name)).float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_without_rows(name: str) -> None:
    assert linear(rows(0), matrix_of(name)).shape == (0, NUM_OUTPUTS)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_deterministic_rows_do_not_depend_on_others(name: str, dtype: torch.dtype) -> None:
    """But for the last bit: the interpreter's own products of matrices do not sum in one order at every place.

    Other kernels round weights otherwise, which shows far above that.
    """
    x, matrix = rows(70, dtype), matrix_of(name, dtype)
    together = linear(x, matrix, out_dtype=torch.float32, is_deterministic=True)
    limit = 1e-6 * float(together.abs().max())
    for first, end in ((0, 1), (4, 5), (69, 70), (3, 18)):
        part = linear(x[first:end], matrix, out_dtype=torch.float32, is_deterministic=True)
        torch.testing.assert_close(part, together[first:end], rtol=0, atol=limit)


def test_deterministic_products_have_one_tile() -> None:
    for num_outputs in (40, 4096, 128256):
        assert len({gemm_tile(num_rows, num_outputs, is_deterministic=True) for num_rows in range(1, 300)}) == 1
        assert len({gemm_tile(num_rows, num_outputs, is_deterministic=False) for num_rows in range(1, 300)}) == 3


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_is_not_finite_stays_alone(name: str, is_deterministic: bool, poison: float) -> None:
    x, matrix = rows(5), matrix_of(name)
    clean = linear(x, matrix, is_deterministic=is_deterministic)
    x[3, 100] = poison
    found = linear(x, matrix, is_deterministic=is_deterministic)
    assert not found[3].isfinite().any()
    others = [0, 1, 2, 4]
    assert torch.equal(found[others], clean[others])
    assert not linear(x[3:4], matrix, is_deterministic=is_deterministic).isfinite().any()


def test_matrices_of_one_format_are_stacked() -> None:
    parts = [random_int4(rows_, NUM_COLUMNS, 32, has_minimums=True) for rows_ in (16, 32, 5)]
    bias = random(53, seed=4)
    matrix = to_device([tile(parts[0]), parts[1], tile(parts[2])], bias, "cpu", torch.float16)
    assert isinstance(matrix, Int4Matrix)
    x = rows(3)
    expected = torch.cat([exact_product(x, part) for part in parts], dim=1) + bias
    assert_near(linear(x, matrix), expected, torch.float16)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_matrices_of_several_formats_lie_side_by_side(has_bias: bool, num_rows: int) -> None:
    parts = [WEIGHTS[name] for name in ("int4", "int4", "int8", "fp", "int4-affine", "fp8")]
    bias = random(6 * NUM_OUTPUTS, seed=4) if has_bias else None
    matrix = to_device(parts, bias, "cpu", torch.float16)
    assert isinstance(matrix, SideBySide)
    assert matrix.shape == (6 * NUM_OUTPUTS, NUM_COLUMNS)
    assert [part.shape[0] // NUM_OUTPUTS for part in matrix.parts] == [2, 1, 1, 1, 1]
    x = rows(num_rows)
    expected = torch.cat([exact_product(x, part) for part in parts], dim=1)
    expected = expected if bias is None else expected + bias
    for is_deterministic in (False, True):
        assert_near(linear(x, matrix, is_deterministic=is_deterministic), expected, torch.float16)


def test_other_columns_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="columns"):
        to_device([random_fp(4, 32), random_fp(4, 64)], None, "cpu", torch.float16)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_products_may_have_strides(name: str) -> None:
    x = random(7, NUM_COLUMNS + 16, seed=5, dtype=torch.float16)[:, :NUM_COLUMNS]
    wide = torch.full((7, NUM_OUTPUTS + 3), 7.0, dtype=torch.float16)
    found = linear(x, matrix_of(name), out=wide[:, :NUM_OUTPUTS])
    assert found.data_ptr() == wide.data_ptr()
    assert torch.equal(found, linear(x.contiguous(), matrix_of(name)))
    assert bool((wide[:, NUM_OUTPUTS:] == 7).all())


@pytest.mark.parametrize("name", ["int4", "fp"])
def test_more_row_tiles_than_share_weights(name: str) -> None:
    x = rows(150)
    found = linear(x, matrix_of(name), is_deterministic=True)
    assert_near(found, exact_product(x, WEIGHTS[name], random(NUM_OUTPUTS, seed=4)), torch.float16)


def test_fp8_activations_are_for_many_rows_alone() -> None:
    matrix = matrix_of("fp8")
    few, many = rows(31), rows(32)
    assert torch.equal(linear(few, matrix, has_fp8_activations=True), linear(few, matrix))
    found, exact = linear(many, matrix, has_fp8_activations=True), linear(many, matrix)
    assert not torch.equal(found, exact)
    assert float((found - exact).abs().max() / exact.abs().max()) < 0.1
    assert torch.equal(
        linear(many, matrix, has_fp8_activations=True, is_deterministic=True),
        linear(many, matrix, is_deterministic=True),
    )


def test_floats_are_rounded_to_the_compute_type() -> None:
    matrix = to_device([random_fp(4, 32)], None, "cpu", torch.bfloat16)
    assert isinstance(matrix, FpMatrix)
    assert matrix.values.dtype == torch.bfloat16
