"""The gate of a feed-forward layer. Specifications: `reference.silu_mul` and `reference.gelu_mul`.

Bound by memory: each number is read once, 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .runtime import HALVES, ceil_div, check_tensor

TILE = 1024
"""Numbers of a program: 8 of each half a thread."""
NUM_WARPS = 4


@triton.jit
def gate_mul_kernel(gate_up_ptr, out_ptr, num_columns: tl.constexpr, is_gelu: tl.constexpr, tile: tl.constexpr):
    """out [T, num_columns] = act(gate) * up, of gate_up [T, 2 * num_columns]. Programs: rows, then tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    is_inside = columns < num_columns
    source = gate_up_ptr + row * (2 * num_columns) + columns
    gate = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(source + num_columns, mask=is_inside, other=0.0).to(tl.float32)
    if is_gelu:
        # (1 + tanh(x)) / 2 is the sigmoid of 2 x; 2 * sqrt(2 / pi) = 1.5957691216057308
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        exponent = -gate
    numbers = gate / (1.0 + tl.exp(exponent)) * up
    tl.store(out_ptr + row * num_columns + columns, numbers.to(out_ptr.dtype.element_ty), mask=is_inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> [T, n], 16-bit floats, contiguous: silu of the first half times the second, in float32."""
    return _gate_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> [T, n], 16-bit floats, contiguous: gelu of the first half, in its tanh form, times the second."""
    return _gate_mul(gate_up, is_gelu=True)


def _gate_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    check_tensor("gate and up", gate_up, (num_rows, 2 * num_columns), *HALVES)
    out = gate_up.new_empty(num_rows, num_columns)
    if num_rows:
        grid = (num_rows, ceil_div(num_columns, TILE))
        gate_mul_kernel[grid](gate_up, out, num_columns=num_columns, is_gelu=is_gelu, tile=TILE, num_warps=NUM_WARPS)
    return out
