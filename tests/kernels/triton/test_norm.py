"""Adding to the hidden numbers and norming them, against the specification in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.triton.norm import add, add_rms_norm
from tests.kernels.triton.numbers import COMPUTE_DTYPES, TOLERANCES, assert_near, random

EPS = 1e-5
WIDTHS = [1, 16, 64, 72, 576, 1000, 1536, 3072]
"""Powers of two, multiples of a vector, and neither."""


def normed(hidden: Tensor, product: Tensor | None, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The hidden numbers after, and their norm."""
    hidden, out = hidden.clone(), torch.full(hidden.shape, float("nan"), dtype=dtype)
    assert add_rms_norm(hidden, product, weight, EPS, out) is out
    return hidden, out


def check(num_rows: int, width: int, dtype: torch.dtype, has_product: bool) -> None:
    hidden, weight = random(num_rows, width) * 3, 1 + random(width, seed=1) / 2
    product = random(num_rows, width, seed=2, dtype=dtype) if has_product else None
    after, out = normed(hidden, product, weight, dtype)
    assert torch.equal(after, hidden if product is None else hidden + product.float())
    assert_near(out, reference.rms_norm(after.double(), weight.double(), EPS), dtype)


@pytest.mark.parametrize("has_product", [False, True])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(width: int, dtype: torch.dtype, has_product: bool) -> None:
    check(3, width, dtype, has_product)


@pytest.mark.parametrize("num_rows", [1, 2, 17])
def test_every_row_count(num_rows: int) -> None:
    check(num_rows, 72, torch.bfloat16, has_product=True)


def test_no_rows_are_no_launch() -> None:
    normed(torch.zeros(0, 64), torch.zeros(0, 64, dtype=torch.float16), torch.ones(64), torch.float16)
    assert add(torch.zeros(0, 64), torch.zeros(0, 64, dtype=torch.float16)).shape == (0, 64)


def test_rows_of_zeros_stay_zeros() -> None:
    _, out = normed(torch.zeros(2, 64), None, torch.ones(64), torch.float16)
    assert torch.equal(out, torch.zeros(2, 64, dtype=torch.float16))


def test_small_and_large_numbers_keep_their_precision() -> None:
    """The square of neither fits in 16 bits; products of very small numbers are near eps."""
    for factor in (1e-4, 1e4):
        hidden, weight = random(2, 256) * factor, torch.ones(256)
        _, out = normed(hidden, None, weight, torch.float16)
        assert_near(out, reference.rms_norm(hidden.double(), weight.double(), EPS), torch.float16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_a_row_that_is_not_finite_spoils_itself_only(dtype: torch.dtype, bad: float) -> None:
    hidden, weight = random(3, 72), torch.ones(72)
    product = random(3, 72, seed=1, dtype=dtype)
    good, good_out = normed(hidden, product, weight, dtype)
    product[1, 40] = bad
    after, out = normed(hidden, product, weight, dtype)
    assert not after[1].isfinite().all()
    assert not out[1].isfinite().all()
    for row in (0, 2):
        assert torch.equal(after[row], good[row])
        assert torch.equal(out[row], good_out[row])


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    hidden, weight = random(5, 576), random(576, seed=1)
    _, together = normed(hidden, None, weight, torch.bfloat16)
    for row in range(5):
        _, alone = normed(hidden[row : row + 1], None, weight, torch.bfloat16)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("dtype", "width"), list(product(COMPUTE_DTYPES, [16, 1000, 2100])))
def test_adding_alone(dtype: torch.dtype, width: int) -> None:
    hidden, addend = random(3, width), random(3, width, seed=1, dtype=dtype)
    expected = hidden + addend.float()
    assert add(hidden, addend) is hidden
    assert torch.equal(hidden, expected)


def test_tolerances_can_be_missed() -> None:
    """A norm without its eps, or with another weight, is not near."""
    hidden = random(2, 64) * 1e-3
    _, out = normed(hidden, None, torch.ones(64), torch.bfloat16)
    with pytest.raises(AssertionError, match="off by"):
        assert_near(out, reference.rms_norm(hidden.double(), torch.ones(64).double(), 0.0), torch.bfloat16)
    assert max(TOLERANCES.values()) < 0.02
