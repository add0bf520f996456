"""Scales with the least squared error. The largest number of a group seldom deserves to be met exactly.

Several scales are tried; from the nearest quanta that each gives, the best scale for those quanta follows by linear
regression, and from that new quanta. What is kept is judged as it will be stored, rounded to float16, and what
`from_largest` gives is among the candidates: no group comes out worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import Grid, Scales, from_largest

FACTORS = (0.65, 0.72, 0.79, 0.86, 0.93, 1.0, 1.07)
"""Of the scale that the largest number asks for."""
NUM_REFINEMENTS = 2
"""Regressions from the best of the candidates."""


def searched(groups: Tensor, grid: Grid) -> tuple[Scales, Tensor]:
    """float32 [num_rows, num_groups, group_size] -> scales, and their nearest quanta."""
    best = from_largest(groups, grid)
    least = best.squared_error(groups, best.quanta(groups, grid))

    def keep(candidate: Scales) -> None:
        nonlocal best, least
        error = candidate.squared_error(groups, candidate.quanta(groups, grid))
        # Not where it is not a number: a scale may leave float16.
        is_better = error < least
        best, least = candidate.where(is_better, best), torch.where(is_better, error, least)

    for start in _starts(groups, grid, best):
        keep(_regressed(groups, start.quanta(groups, grid), grid))
    for _ in range(NUM_REFINEMENTS):
        keep(_regressed(groups, best.quanta(groups, grid), grid))
    return best, best.quanta(groups, grid)


def _starts(groups: Tensor, grid: Grid, largest: Scales) -> list[Scales]:
    scale = largest.scale.float()
    if not grid.has_minimum:
        # The other sign gives the largest number the end with one quantum less.
        signs = (1,) if grid.lowest == -grid.highest else (1, -1)
        return [Scales(scale * factor * sign) for factor in FACTORS for sign in signs]
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    middle = (lowest + highest) / 2
    return [Scales(scale * factor, middle - scale * (factor * grid.num_steps / 2)) for factor in FACTORS]


def _regressed(groups: Tensor, quanta: Tensor, grid: Grid) -> Scales:
    """The scale, and minimum, that make these quanta's values come nearest to the numbers."""
    if not grid.has_minimum:
        squares = quanta.square().sum(-1, keepdim=True)
        return Scales(((groups * quanta).sum(-1, keepdim=True) / squares.clamp_(min=1)).half())
    mean_quantum, mean = quanta.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    spread = quanta - mean_quantum
    variance = spread.square().sum(-1, keepdim=True)
    scale = (groups - mean).mul_(spread).sum(-1, keepdim=True) / torch.where(variance == 0, 1.0, variance)
    return Scales(scale.half(), (mean - scale * mean_quantum).half())
