"""Products of fp8 activations with fp8 matrices, for many rows on cards from sm_89 on: twice the rate of 16 bits.

Activations get one scale a row, and are rounded to 4 significant bits: for prompts, where the matrix rate is the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import float32_to_e4m3, magnitude_bits, scale_of
from .gemm_tiles import GemmTile, store_tile, tile_origin
from .matrices import BLOCK_COLUMNS, Fp8Matrix
from .runtime import next_power_of_two

FIRST_ARCH = 89
TILES = (GemmTile(64, 128, 4, 4, 3), GemmTile(128, 128, 4, 8, 3))
"""For up to as many rows as the first has, and for more."""
LARGEST_NUMBER = tl.constexpr(448.0)
NUMBERS_PER_WARP = 512


@triton.jit
def quantise_fp8_kernel(x_ptr, numbers_ptr, scales_ptr, num_columns, x_stride, WIDTH: tl.constexpr):
    """A program a row: scale = largest magnitude / 448, numbers = x / scale, to the nearest."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_inside = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(x), axis=0), LARGEST_NUMBER)
    tl.store(numbers_ptr + row * num_columns + columns, float32_to_e4m3(x / scale), mask=is_inside)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def w8a8_gemm_kernel(
    x_ptr,
    x_scales_ptr,
    numbers_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    out_stride,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """x: float8e4nv [num_rows, 32 * num_blocks], contiguous; numbers: float8e4nv; out: with a stride."""
    TILE_COLUMNS: tl.constexpr = 32 * TILE_BLOCKS
    first_row, first_output = tile_origin(num_rows, num_outputs, TILE_ROWS, TILE_OUTPUTS)
    rows, outputs = first_row + tl.arange(0, TILE_ROWS), first_output + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    columns = tl.arange(0, TILE_COLUMNS)
    num_columns = num_blocks * 32
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    number_ptrs = numbers_ptr + outputs[:, None].to(tl.int64) * num_columns + columns[None, :]
    products = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_weight, is_number = is_output[:, None], is_row[:, None]
        if HAS_TAIL:
            is_column = (block * 32 + columns < num_columns)[None, :]
            is_weight &= is_column
            is_number &= is_column
        x = tl.load(x_ptrs, mask=is_number, other=0.0)
        weights = tl.load(number_ptrs, mask=is_weight, other=0.0)
        # sm_90 keeps fewer than float32's bits while it adds products of fp8: not beyond a tile's columns.
        products = tl.dot(weights, tl.trans(x), products, max_num_imprecise_acc=TILE_COLUMNS)
        x_ptrs += TILE_COLUMNS
        number_ptrs += TILE_COLUMNS
    products *= tl.load(scales_ptr + outputs, mask=is_output, other=0.0)[:, None]
    products *= tl.load(x_scales_ptr + rows, mask=is_row, other=0.0)[None, :]
    store_tile(products, bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output)


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """16-bit floats [T, K], rows may have a stride -> e4m3fn [T, K] as uint8, float32 scales [T]."""
    num_rows, num_columns = x.shape
    numbers = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    width = next_power_of_two(num_columns)
    num_warps = min(max(width // NUMBERS_PER_WARP, 1), 16)
    quantise_fp8_kernel[(num_rows,)](x, numbers, scales, num_columns, x.stride(0), WIDTH=width, num_warps=num_warps)
    return numbers, scales


def w8a8_gemm(x: Tensor, matrix: Fp8Matrix, out: Tensor) -> Tensor:
    """x: 16-bit floats [T, K], out: floats [T, N]; rows may have strides. Returns `out`."""
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    numbers, x_scales = quantise_fp8(x)
    tile = TILES[0] if num_rows <= TILES[0].rows else TILES[1]
    num_blocks = num_columns // BLOCK_COLUMNS
    w8a8_gemm_kernel[(tile.num_programs(num_rows, num_outputs),)](
        numbers.view(torch.float8_e4m3fn),
        x_scales,
        matrix.values.view(torch.float8_e4m3fn),
        matrix.scales,
        matrix.bias,
        out,
        num_rows,
        num_outputs,
        num_blocks,
        out.stride(0),
        **tile.options(num_blocks),
    )
    return out
