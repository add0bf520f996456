"""Which row counts are called safe: found by trying, on products that misbehave in known ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chatkv.kernels.cpu.invariance import measured_once, smallest_safe, unsafe_row_counts


def differs_at(*counts: int) -> Callable[[Tensor], Tensor]:
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
    found = unsafe_row_counts(differs_at(*unsafe), 8)
    assert found == set(unsafe)
    assert smallest_safe(found) == expected


def test_a_rows_place_counts() -> None:
    def product(x: Tensor) -> Tensor:
        return x + 1e-3 * (torch.arange(len(x)) % 3 == 0).unsqueeze(1)

    assert smallest_safe(unsafe_row_counts(product, 8)) is None


def test_what_was_measured_holds_for_the_same_shape_and_number_of_threads() -> None:
    key, before = ("test", 8), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert measured_once(key, lambda: 1) == 1
        assert measured_once(key, lambda: 2) == 1
        assert measured_once(("test", 9), lambda: 2) == 2
        torch.set_num_threads(2)
        assert measured_once(key, lambda: 3) == 3
    finally:
        torch.set_num_threads(before)
