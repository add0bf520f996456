"""Small things that every launcher needs."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

TL_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
"""Compute dtypes, as kernels name them."""


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below `number` (at least 1): tiles have such extents."""
    return 1 << (number - 1).bit_length()


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
