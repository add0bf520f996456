"""Weight matrices as kernels see them: packed tensors and nothing else. Every matrix is [num_rows, num_columns]."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

from torch import Tensor

GROUP_SIZE = 32
"""Neighbouring columns of a row that share one scale, in tiles."""
GROUP_SIZES = (32, 64, 128)
"""Of packed matrices that do not lie in tiles."""
INT4_ZERO_POINT = 8
"""The quantum that means 0 where an int4 matrix has no minimums."""
TILE_ROWS = 16
"""Rows of a tile."""
TILE_BYTES = {"int4-affine": 320, "int4": 288, "int8": 544}
"""Formats of a `TiledWeight` -> bytes of a tile."""
NF4_BLOCK = 64
"""Neighbouring columns of a row that share one scale in an `Nf4Weight`."""


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

    `quanta`: [num_rows, num_groups, group_size] int8; `scales`: [num_rows, num_groups] float16, or float32 where those
    were not exact.
    """

    quanta: Tensor
    scales: Tensor

    @property
    def group_size(self) -> int:
        return self.quanta.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group_size


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """value = scale * quantum + minimum, or scale * (quantum - 8) where `minimums` is None. Quanta are 0 .. 15.

    `quanta`: [num_rows, num_groups, group_size / 2] uint8: byte j holds column j of the group in its low half and
    column j + group_size / 2 in its high half. `scales`, `minimums`: [num_rows, num_groups], of one type: float16, or
    float32 where that was not exact.
    """

    quanta: Tensor
    scales: Tensor
    minimums: Tensor | None = None

    @property
    def group_size(self) -> int:
        return 2 * self.quanta.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * self.group_size


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """value = number * scale.

    `values`: [num_rows, num_columns] uint8, the bytes of float8 e4m3fn (4 bits of exponent, 3 of mantissa, no
    infinities, largest number 448); `scales`: [num_rows] float32.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Nf4Weight:
    """As bitsandbytes packs NF4 (arXiv:2305.14314): value = one of 16 fixed numbers in -1 .. 1, times a scale.

    `quanta`: [num_rows, num_columns / 2] uint8: byte j holds column 2 j in its high half and column 2 j + 1 in its low
    half; `scales`: [num_rows, num_columns / 64] float32, the largest magnitude of each block.
    """

    quanta: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.quanta.shape[0], 2 * self.quanta.shape[1]


@dataclass(frozen=True, slots=True)
class BnbInt8Weight:
    """As bitsandbytes packs 8 bits (arXiv:2208.07339): value = quantum * scale / 127, one scale a row.

    `quanta`: [num_rows, num_columns] int8; `scales`: [num_rows] float32, the largest magnitude of each row.
    """

    quanta: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.quanta.shape[0], self.quanta.shape[1]


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """An int4 or int8 matrix in groups of 32, in the order that native kernels read it: tiles of 16 rows by 32 columns.

    `format`: a key of TILE_BYTES. `tiles`: [ceil(num_rows / 16), num_groups, TILE_BYTES[format]] uint8, contiguous;
    rows past `num_rows` are zero. What a tile's bytes mean: `tile_layout`, which converts exactly both ways.
    """

    format: str
    tiles: Tensor
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.tiles.shape[1] * GROUP_SIZE


BnbWeight: TypeAlias = Nf4Weight | BnbInt8Weight
"""What bitsandbytes packs and unpacks: multiplied through torch, by no kernels of ours."""
Weight: TypeAlias = FpWeight | Int8Weight | Int4Weight | Fp8Weight | BnbWeight | TiledWeight


def num_bytes(weight: Weight) -> int:
    """As it is packed."""
    parts = (getattr(weight, field.name) for field in fields(weight))
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def select_rows(weight: Weight, rows: Tensor) -> Weight:
    """The given rows (int64 [n]), still packed. Scales belong to rows, so moving rows is exact.

    Rows of a TiledWeight come as Int4Weight or Int8Weight.
    """
    match weight:
        case FpWeight(values):
            return FpWeight(values.index_select(0, rows))
        case Int8Weight(quanta, scales):
            return Int8Weight(quanta.index_select(0, rows), scales.index_select(0, rows))
        case Int4Weight(quanta, scales, minimums):
            chosen = None if minimums is None else minimums.index_select(0, rows)
            return Int4Weight(quanta.index_select(0, rows), scales.index_select(0, rows), chosen)
        case Fp8Weight(values, scales):
            return Fp8Weight(values.index_select(0, rows), scales.index_select(0, rows))
        case Nf4Weight(quanta, scales):
            return Nf4Weight(quanta.index_select(0, rows), scales.index_select(0, rows))
        case BnbInt8Weight(quanta, scales):
            return BnbInt8Weight(quanta.index_select(0, rows), scales.index_select(0, rows))
        case TiledWeight():
            from .tile_layout import untiled_rows  # which needs the classes above

            return untiled_rows(weight, rows)
