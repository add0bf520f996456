"""Products with int8 matrices: one row without tensor cores, any number of rows with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm_tiles import gemm_tile, store_tile, tile_origin
from .gemv_tiles import gemv_tile
from .matrices import BLOCK_COLUMNS, Int8Matrix
from .runtime import TL_DTYPES, ceil_div
from .weight_bits import FLOAT_ONE, PAIR_OF_ONES, counted_up, float_pair, int8_pair, of_each_word


@triton.jit(do_not_specialize=["num_rows"])
def int8_gemm_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    x_stride,
    out_stride,
    ones,
    GROUP_BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """x: [num_rows, 32 * num_blocks], out: [num_rows, num_outputs], both with strides; words: int32, 4 quanta each."""
    CDT: tl.constexpr = x_ptr.dtype.element_ty
    NUM_GROUPS: tl.constexpr = max(TILE_BLOCKS // GROUP_BLOCKS, 1)
    GROUP_WORDS: tl.constexpr = 8 * TILE_BLOCKS // NUM_GROUPS
    TILE_COLUMNS: tl.constexpr = 32 * TILE_BLOCKS
    ones += tl.program_id(2)
    first_row, first_output = tile_origin(num_rows, num_outputs, TILE_ROWS, TILE_OUTPUTS)
    rows, outputs = first_row + tl.arange(0, TILE_ROWS), first_output + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    columns, groups = tl.arange(0, TILE_COLUMNS), tl.arange(0, NUM_GROUPS)
    words = tl.arange(0, 8 * TILE_BLOCKS)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
    word_ptrs = words_ptr + outputs[:, None].to(tl.int64) * (num_blocks * 8) + words[None, :]
    num_groups = num_blocks // GROUP_BLOCKS
    scale_places = outputs[:, None].to(tl.int64) * num_groups + groups[None, :]
    is_group = is_output[:, None] & (groups < num_groups)[None, :]
    scales = tl.load(scales_ptr + scale_places, mask=is_group, other=0.0)
    products = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_word, is_number = is_output[:, None], is_row[:, None]
        if HAS_TAIL:
            is_word &= (block * 8 + words < num_blocks * 8)[None, :]
            is_number &= (block * 32 + columns < num_blocks * 32)[None, :]
        tile = tl.reshape(tl.load(word_ptrs, mask=is_word, other=0), [TILE_OUTPUTS, NUM_GROUPS, GROUP_WORDS])
        x = tl.load(x_ptrs, mask=is_number, other=0.0)
        # The next step's, ahead: loads this narrow are not made ahead by the compiler.
        next_group = (block + TILE_BLOCKS) // GROUP_BLOCKS
        is_group = is_output[:, None] & (next_group + groups < num_groups)[None, :]
        next_scales = tl.load(scales_ptr + scale_places + next_group, mask=is_group, other=0.0)
        scale = scales.to(CDT)[:, :, None]
        byte_0, byte_2 = int8_pair(tile, ones, 0, CDT)
        byte_1, byte_3 = int8_pair(tile, ones, 1, CDT)
        weights = tl.join(tl.join(byte_0 * scale, byte_2 * scale), tl.join(byte_1 * scale, byte_3 * scale))
        weights = tl.reshape(weights, [TILE_OUTPUTS, TILE_COLUMNS])
        products = tl.dot(weights, tl.trans(x), products)
        x_ptrs += TILE_COLUMNS
        word_ptrs += 8 * TILE_BLOCKS
        scales = next_scales
    store_tile(products, bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output)


@triton.jit
def int8_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_blocks,
    one,
    CDT: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """x: one row, four numbers an int64 [8 * num_blocks]; out: [num_outputs].

    A quantum q becomes 1.5 + q / 256; the 1.5 x are known from x alone, and are where the sums begin.
    """
    one += tl.program_id(2)
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = outputs < num_outputs
    blocks, words = tl.arange(0, TILE_BLOCKS), tl.arange(0, TILE_BLOCKS * 8)
    word_ptrs = words_ptr + outputs[:, None].to(tl.int64) * (num_blocks * 8) + words[None, :]
    scale_places = outputs[:, None].to(tl.int64) * (num_blocks // GROUP_BLOCKS)
    products = tl.zeros([TILE_OUTPUTS, TILE_BLOCKS * 8], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_word = block * 8 + words < num_blocks * 8
        # Quanta count from -128 where the sign bit is turned.
        tile = tl.load(word_ptrs + block * 8, mask=is_output[:, None] & is_word[None, :], other=0) ^ -0x7F7F7F80
        places = scale_places + ((block + blocks) // GROUP_BLOCKS)[None, :]
        is_scale = is_output[:, None] & (block + blocks < num_blocks)[None, :]
        scales = tl.load(scales_ptr + places, mask=is_scale, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + block * 8 + words, mask=is_word, other=0)
        x0, x1 = float_pair(x.to(tl.int32), CDT)
        x2, x3 = float_pair((x >> 32).to(tl.int32), CDT)
        sums = tl.zeros_like(products) - (((x0 + x1) + (x2 + x3)) * 1.5)[None, :]
        sums += counted_up(tile << 15, one, 15, 8) * x0[None, :]
        sums += counted_up(tile << 7, one, 15, 8) * x1[None, :]
        sums += counted_up(tile >> 1, one, 15, 8) * x2[None, :]
        sums += counted_up(tile >> 9, one, 15, 8) * x3[None, :]
        products += sums * of_each_word(scales, 8)
    product = tl.sum(products, axis=1) * 256.0
    if bias_ptr is not None:
        product += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
    tl.store(out_ptr + outputs, product.to(out_ptr.dtype.element_ty), mask=is_output)


def int8_gemm(x: Tensor, matrix: Int8Matrix, out: Tensor, *, is_deterministic: bool = False) -> Tensor:
    """x: 16-bit floats [T, K], out: floats [T, N]; rows may have strides. Returns `out`."""
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    tile = gemm_tile(num_rows, num_outputs, is_deterministic=is_deterministic)
    num_blocks = num_columns // BLOCK_COLUMNS
    int8_gemm_kernel[(tile.num_programs(num_rows, num_outputs),)](
        x,
        matrix.quanta.view(torch.int32),
        matrix.scales,
        matrix.bias,
        out,
        num_rows,
        num_outputs,
        num_blocks,
        x.stride(0),
        out.stride(0),
        PAIR_OF_ONES[x.dtype],
        GROUP_BLOCKS=matrix.group_size // BLOCK_COLUMNS,
        **tile.options(num_blocks),
    )
    return out


def int8_gemv(x: Tensor, matrix: Int8Matrix, out: Tensor) -> Tensor:
    """x: one row of 16-bit floats [1, K], out: floats [1, N]. Returns `out`."""
    num_outputs, num_columns = matrix.shape
    tile = gemv_tile(num_columns // BLOCK_COLUMNS)
    int8_gemv_kernel[(ceil_div(num_outputs, tile.outputs),)](
        x[0].view(torch.int64),
        matrix.quanta.view(torch.int32),
        matrix.scales,
        matrix.bias,
        out,
        num_outputs,
        num_columns // BLOCK_COLUMNS,
        FLOAT_ONE,
        CDT=TL_DTYPES[x.dtype],
        GROUP_BLOCKS=matrix.group_size // BLOCK_COLUMNS,
        TILE_OUTPUTS=tile.outputs,
        TILE_BLOCKS=tile.blocks,
        num_warps=tile.num_warps,
    )
    return out
