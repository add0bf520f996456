"""Weight matrices as kernels see them: packed tensors and nothing else. Every matrix is [num_rows, num_columns]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

GROUP_SIZE = 32
"""Neighbouring columns of a row that share one scale."""
INT4_ZERO_POINT = 8
"""The quantum that means 0 where an int4 matrix has no minimums."""


@dataclass(frozen=True, slots=True)
class FpWeight:
    """`values`: [num_rows, num_columns], float32, float16 or bfloat16."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """value = quantum * scale.

    `quanta`: [num_rows, num_groups, 32] int8; `scales`: [num_rows, num_groups] float16.
    """

    quanta: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """value = scale * quantum + minimum, or scale * (quantum - 8) where `minimums` is None. Quanta are 0 .. 15.

    `quanta`: [num_rows, num_groups, 16] uint8: byte j holds column j in its low half and column j + 16 in its high
    half. `scales`, `minimums`: [num_rows, num_groups] float16.
    """

    quanta: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * GROUP_SIZE


Weight: TypeAlias = FpWeight | Int8Weight | Int4Weight


def select_rows(weight: Weight, rows: Tensor) -> Weight:
    """The given rows (int64 [n]), still packed. Scales belong to rows, so moving rows is exact."""
    match weight:
        case FpWeight(values):
            return FpWeight(values.index_select(0, rows))
        case Int8Weight(quanta, scales):
            return Int8Weight(quanta.index_select(0, rows), scales.index_select(0, rows))
        case Int4Weight(quanta, scales, minimums):
            chosen = None if minimums is None else minimums.index_select(0, rows)
            return Int4Weight(quanta.index_select(0, rows), scales.index_select(0, rows), chosen)
