"""Matrices in groups of columns: the nearest quanta for given scales, and scales from the largest number.

Everything is float32 [num_rows, num_groups, group_size] here; scales and minimums are float16 [num_rows, num_groups, 1]
as they will be stored, so that quanta are the nearest ones to what will be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chatkv.kernels.weights import INT4_ZERO_POINT, Int4Weight, Int8Weight


@dataclass(frozen=True, slots=True)
class Grid:
    """Quanta from `lowest` to `highest`."""

    lowest: int
    highest: int
    has_minimum: bool = False

    @property
    def num_steps(self) -> int:
        return self.highest - self.lowest


INT8 = Grid(-127, 127)
INT4 = Grid(-8, 7)
INT4_AFFINE = Grid(0, 15, has_minimum=True)


@dataclass(frozen=True, slots=True)
class Scales:
    """value = scale * quantum + minimum."""

    scale: Tensor
    minimum: Tensor | None = None

    def quanta(self, groups: Tensor, grid: Grid) -> Tensor:
        """The nearest ones, as float32; 0 or the lowest where the scale is 0."""
        offsets = groups if self.minimum is None else groups - self.minimum.float()
        scale = self.scale.float()
        quanta = (offsets / torch.where(scale == 0, 1.0, scale)).round_()
        return quanta.clamp_(grid.lowest, grid.highest)

    def values(self, quanta: Tensor) -> Tensor:
        products = quanta * self.scale.float()
        return products if self.minimum is None else products.add_(self.minimum.float())

    def squared_error(self, groups: Tensor, quanta: Tensor) -> Tensor:
        """[num_rows, num_groups, 1]"""
        return (self.values(quanta) - groups).square_().sum(-1, keepdim=True)

    def where(self, condition: Tensor, other: Scales) -> Scales:
        """These where the condition holds, else the other's."""
        minimum = None
        if self.minimum is not None and other.minimum is not None:
            minimum = torch.where(condition, self.minimum, other.minimum)
        return Scales(torch.where(condition, self.scale, other.scale), minimum)


def from_largest(groups: Tensor, grid: Grid) -> Scales:
    """Scales with which the largest number of a group just fits. Without a minimum and with one more quantum below 0
    than above, it is the negative end that it meets: as GGUF's Q4_0 does."""
    if grid.has_minimum:
        lowest, highest = groups.aminmax(dim=-1, keepdim=True)
        minimum = lowest.half()
        return Scales(((highest - minimum.float()) / grid.num_steps).half(), minimum)
    if grid.lowest == -grid.highest:
        return Scales((groups.abs().amax(-1, keepdim=True) / grid.highest).half())
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    return Scales((largest / grid.lowest).half())


def packed(grid: Grid, scales: Scales, quanta: Tensor) -> Int4Weight | Int8Weight:
    scale = scales.scale.squeeze(-1)
    if grid is INT8:
        return Int8Weight(quanta.to(torch.int8), scale)
    low, high = quanta.add(0 if grid.has_minimum else INT4_ZERO_POINT).to(torch.uint8).chunk(2, dim=-1)
    minimum = None if scales.minimum is None else scales.minimum.squeeze(-1)
    return Int4Weight(low | high << 4, scale, minimum)
