"""Which row counts are called safe: found by trying, on products that misbehave in known ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatkv.kernels.cpu.invariance import row_multiple, smallest_safe


def differs_at(*counts: int) -> object:
    """A product that gives other bits for these row counts."""

    def product(x: Tensor) -> Tensor:
        y = x * 2
        return y + 1e-6 * y if len(x) in counts else y

    return product


@pytest.mark.parametrize(
    ("unsafe", "expected"),
    [((), 1), ((1,), 2), ((1, 3), 2), ((1, 2, 3), 4), ((5, 6), 4), ((4, 12), 8), ((96,), None), ((16, 8), 32)],
)
def test_the_smallest_multiple_without_an_unsafe_count(unsafe: tuple[int, ...], expected: int | None) -> None:
    assert row_multiple([differs_at(*unsafe)], [8]) == expected  # type: ignore[list-item]
    assert smallest_safe(set(unsafe)) == expected


def test_every_shape_counts() -> None:
    assert row_multiple([differs_at(1), differs_at(2), differs_at()], [8, 8, 16]) == 4  # type: ignore[list-item]


def test_a_rows_place_counts() -> None:
    def product(x: Tensor) -> Tensor:
        return x + 1e-3 * (torch.arange(len(x)) % 3 == 0).unsqueeze(1)

    assert row_multiple([product], [8]) is None
