"""Matrices in fp8 (e4m3fn), one float32 scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv.kernels.weights import Fp8Weight

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
FACTORS = tuple(2.0 ** (step / 8) for step in range(-2, 8))
"""Of the scale with which the largest number of a row becomes 448: over one octave the numbers of a row meet other
places of the grid, beyond it the same again."""


def quantised(rows: Tensor, *, is_searched: bool) -> Fp8Weight:
    """float32 [num_rows, num_columns]. The search keeps the scale with the least squared error in each row."""
    largest = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    best, least = largest, _squared_error(rows, largest)
    for factor in FACTORS if is_searched else ():
        scales = largest * factor
        error = _squared_error(rows, scales)
        is_better = error < least
        best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
    return Fp8Weight(_numbers(rows, best).view(torch.uint8), best.squeeze(-1))


def _numbers(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _squared_error(rows: Tensor, scales: Tensor) -> Tensor:
    return (_numbers(rows, scales).float().mul_(scales) - rows).square_().sum(-1, keepdim=True)
