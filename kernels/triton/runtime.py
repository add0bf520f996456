"""Small things that every launcher needs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TL_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
"""Compute dtypes, as kernels name them."""
HALVES = (torch.float16, torch.bfloat16)


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below `number` (at least 1): tiles have such extents."""
    return 1 << (number - 1).bit_length()


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def register_limit(limit: int | None) -> dict[str, int]:
    """Launch option: registers that a thread may have. Without it NVIDIA's assembler may spill a few to have room for
    one more program; AMD's compiler does not know it."""
    if limit is None or triton.knobs.runtime.interpret:
        return {}
    return {"maxnreg": limit} if triton.runtime.driver.active.get_current_target().backend == "cuda" else {}


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """What a kernel takes for granted: numbers of one of `dtypes`, `shape`, contiguous."""
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}"
    assert tensor.shape == shape, f"{name} is {list(tensor.shape)}, not {list(shape)}"
    assert tensor.is_contiguous(), f"{name} is not contiguous: strides {tensor.stride()}"
