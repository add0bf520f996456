"""The hidden numbers: what a layer adds to them, and their norm. Specification: `reference.rms_norm`.

Bound by memory: one pass, everything of a row in the registers of one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import HALVES, ceil_div, check_tensor, next_power_of_two

NUMBERS_PER_WARP = 512
"""Of a row: 16 a thread, four loads of 16 bytes."""
MAX_WARPS = 16
ADD_TILE = 1024


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr,
    product_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_columns: tl.constexpr,
    width: tl.constexpr,
    has_product: tl.constexpr,
):
    """A program a row. hidden float32, product and out 16-bit: [T, num_columns]; weight float32 [num_columns]."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, width)
    is_inside = columns < num_columns
    hidden = tl.load(hidden_ptr + row + columns, mask=is_inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
    if has_product:
        hidden += tl.load(product_ptr + row + columns, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(hidden_ptr + row + columns, hidden, mask=is_inside)
    factor = tl.rsqrt(tl.sum(hidden * hidden, axis=0) / num_columns + eps)
    tl.store(out_ptr + row + columns, (hidden * factor * weight).to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def add_kernel(hidden_ptr, product_ptr, num_columns: tl.constexpr, tile: tl.constexpr):
    """hidden += product, as above. Programs: rows, then tiles of columns."""
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    is_inside = columns < num_columns
    places = tl.program_id(0).to(tl.int64) * num_columns + columns
    hidden = tl.load(hidden_ptr + places, mask=is_inside, other=0.0)
    product = tl.load(product_ptr + places, mask=is_inside, other=0.0)
    tl.store(hidden_ptr + places, hidden + product.to(tl.float32), mask=is_inside)


def add_rms_norm(hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """hidden += product, in place; out = rms_norm(hidden) * weight.

    hidden: float32 [T, n], contiguous; product: 16-bit floats [T, n], contiguous; weight: float32 [n]; out: 16-bit
    floats [T, n], contiguous. Sums are in float32. Returns `out`.
    """
    num_rows, num_columns = hidden.shape
    check_tensor("hidden", hidden, (num_rows, num_columns), torch.float32)
    check_tensor("weight", weight, (num_columns,), torch.float32)
    check_tensor("out", out, (num_rows, num_columns), *HALVES)
    if product is not None:
        check_tensor("product", product, (num_rows, num_columns), *HALVES)
    if num_rows:
        width = next_power_of_two(num_columns)
        num_warps = min(max(width // NUMBERS_PER_WARP, 1), MAX_WARPS)
        add_rms_norm_kernel[(num_rows,)](
            hidden,
            product,
            weight,
            out,
            eps,
            num_columns=num_columns,
            width=width,
            has_product=product is not None,
            num_warps=num_warps,
        )
    return out


def add(hidden: Tensor, product: Tensor) -> Tensor:
    """hidden += product, in place. float32 and 16-bit floats [T, n], both contiguous. Returns `hidden`."""
    num_rows, num_columns = hidden.shape
    check_tensor("hidden", hidden, (num_rows, num_columns), torch.float32)
    check_tensor("product", product, (num_rows, num_columns), *HALVES)
    if num_rows:
        grid = (num_rows, ceil_div(num_columns, ADD_TILE))
        add_kernel[grid](hidden, product, num_columns=num_columns, tile=ADD_TILE, num_warps=4)
    return hidden
