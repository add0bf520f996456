"""Products with 16-bit matrices: by the library, or where a row must not depend on the others, or the result is
float32, by a kernel of our own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm_tiles import GemmTile, store_tile, tile_origin
from .matrices import BLOCK_COLUMNS, FpMatrix

TILE = GemmTile(32, 64, 2, 4, 4)
"""One for all row counts: at 32 rows even the slowest matrix units keep up with memory."""


@triton.jit(do_not_specialize=["num_rows"])
def fp_gemm_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_columns,
    x_stride,
    out_stride,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """x: [num_rows, num_columns], out: [num_rows, num_outputs], both with strides; weights: of the type of x."""
    first_row, first_output = tile_origin(num_rows, num_outputs, TILE_ROWS, TILE_OUTPUTS)
    rows, outputs = first_row + tl.arange(0, TILE_ROWS), first_output + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    columns = tl.arange(0, TILE_COLUMNS)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
    weight_ptrs = weights_ptr + outputs[:, None].to(tl.int64) * num_columns + columns[None, :]
    products = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for column in range(0, num_columns, TILE_COLUMNS):
        is_weight, is_number = is_output[:, None], is_row[:, None]
        if HAS_TAIL:
            is_column = (column + columns < num_columns)[None, :]
            is_weight &= is_column
            is_number &= is_column
        x = tl.load(x_ptrs, mask=is_number, other=0.0)
        weights = tl.load(weight_ptrs, mask=is_weight, other=0.0)
        products = tl.dot(weights, tl.trans(x), products)
        x_ptrs += TILE_COLUMNS
        weight_ptrs += TILE_COLUMNS
    store_tile(products, bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output)


def fp_gemm(x: Tensor, matrix: FpMatrix, out: Tensor) -> Tensor:
    """x: 16-bit floats [T, K], out: floats [T, N]; rows may have strides. Returns `out`.

    A row's bits depend on nothing but that row and the matrix.
    """
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    tile_columns = TILE.blocks * BLOCK_COLUMNS
    fp_gemm_kernel[(TILE.num_programs(num_rows, num_outputs),)](
        x,
        matrix.values,
        matrix.bias,
        out,
        num_rows,
        num_outputs,
        num_columns,
        x.stride(0),
        out.stride(0),
        TILE_ROWS=TILE.rows,
        TILE_OUTPUTS=TILE.outputs,
        TILE_COLUMNS=tile_columns,
        HAS_TAIL=num_columns % tile_columns != 0,
        num_warps=TILE.num_warps,
        num_stages=TILE.num_stages,
    )
    return out


def sum_in_float32() -> None:
    """For the process: by default the library may add the parts of a long sum in 16 bits, where float16 overflows."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def fp_matmul(x: Tensor, matrix: FpMatrix, out: Tensor) -> Tensor:
    """The same by the library, for `out` of the type of x."""
    if matrix.bias is None:
        return torch.mm(x, matrix.values.T, out=out)
    return torch.addmm(matrix.bias.to(x.dtype), x, matrix.values.T, out=out)
