"""How many rows a product must have so that each row's bits are its own.

A BLAS picks another inner loop, with another order of summation, for a few rows than for many, and may hand each
thread a few rows of a larger product. Which row counts are safe depends on the library, the instruction set, the
number of threads and the shape, so it is measured: a product padded to a multiple of `row_multiple` rows must give
the rows of a large product, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch
from torch import Tensor

CANDIDATES = (1, 2, 4, 8, 16, 32)
SMALL_ROW_COUNTS = range(1, 65)
LARGE_ROW_COUNTS = (96, 128, 192, 256, 320, 512)


Measured = TypeVar("Measured")
_measured: dict[Hashable, object] = {}


def measured_once(key: Hashable, measure: Callable[[], Measured]) -> Measured:
    """What `measure` gives, or gave before in this process for an equal `key` and number of threads: of a start with
    the same shapes, most of the time would go into measuring the same again.

    `key`: the operation and the shapes that it depends on; never numbers of a model.
    """
    full_key = (key, torch.get_num_threads())
    if full_key not in _measured:
        _measured[full_key] = measure()
    return cast(Measured, _measured[full_key])


def smallest_safe(unsafe_counts: set[int]) -> int | None:
    """The smallest candidate none of whose multiples is in `unsafe_counts`."""
    return next((m for m in CANDIDATES if not any(count % m == 0 for count in unsafe_counts)), None)


def unsafe_row_counts(product: Callable[[Tensor], Tensor], width: int) -> set[int]:
    """Row counts at which a product's rows differ from those of the largest product tried."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(LARGE_ROW_COUNTS[-1], width, generator=generator)
    # A head is slow to try, and multiplied with few rows: those of one step's samples.
    num_outputs = product(rows[: CANDIDATES[-1]].clone()).shape[-1]
    largest = 128 if num_outputs > 1 << 15 else LARGE_ROW_COUNTS[-1]
    expected = product(rows[:largest].clone())
    counts = [*SMALL_ROW_COUNTS, *(count for count in LARGE_ROW_COUNTS if count < largest)]
    # The last rows of the large product too: a row's place in it must not matter.
    return {
        count
        for count in counts
        if not torch.equal(product(rows[:count].clone()), expected[:count])
        or not torch.equal(product(rows[largest - count : largest].clone()), expected[largest - count :])
    }
