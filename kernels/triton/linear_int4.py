"""Products with int4 matrices: one row without tensor cores, any number of rows with them.

Weights are dequantised in registers: scale * (quantum - 8) + (minimum + 8 * scale), the last term only where there are
minimums; it is small, so that rounding it to 16 bits costs little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm_tiles import gemm_tile, store_tile, tile_origin
from .gemv_tiles import gemv_tile
from .matrices import BLOCK_COLUMNS, Int4Matrix
from .runtime import TL_DTYPES, ceil_div
from .weight_bits import FLOAT_ONE, PAIR_OF_ONES, counted_up, float_pair, int4_pair, of_each_word


@triton.jit
def dequantised_pair(words, ones, scales, shifts, J: tl.constexpr, CDT: tl.constexpr):
    """[..., 2]; shifts may be None."""
    first, second = int4_pair(words, ones, J, CDT)
    if shifts is None:
        return tl.join(first * scales, second * scales)
    else:
        return tl.join(first * scales + shifts, second * scales + shifts)


@triton.jit(do_not_specialize=["num_rows"])
def int4_gemm_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    minimums_ptr,
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
    """x: [num_rows, 32 * num_blocks], out: [num_rows, num_outputs], both with strides; ones: see `weight_bits`."""
    CDT: tl.constexpr = x_ptr.dtype.element_ty
    NUM_GROUPS: tl.constexpr = max(TILE_BLOCKS // GROUP_BLOCKS, 1)
    GROUP_WORDS: tl.constexpr = 4 * TILE_BLOCKS // NUM_GROUPS
    TILE_COLUMNS: tl.constexpr = 32 * TILE_BLOCKS
    ones += tl.program_id(2)
    first_row, first_output = tile_origin(num_rows, num_outputs, TILE_ROWS, TILE_OUTPUTS)
    rows, outputs = first_row + tl.arange(0, TILE_ROWS), first_output + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    columns, groups = tl.arange(0, TILE_COLUMNS), tl.arange(0, NUM_GROUPS)
    words = tl.arange(0, 4 * TILE_BLOCKS)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
    word_ptrs = words_ptr + outputs[:, None].to(tl.int64) * (num_blocks * 4) + words[None, :]
    num_groups = num_blocks // GROUP_BLOCKS
    scale_places = outputs[:, None].to(tl.int64) * num_groups + groups[None, :]
    is_group = is_output[:, None] & (groups < num_groups)[None, :]
    scales = tl.load(scales_ptr + scale_places, mask=is_group, other=0.0)
    minimums = None if minimums_ptr is None else tl.load(minimums_ptr + scale_places, mask=is_group, other=0.0)
    products = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_word, is_number = is_output[:, None], is_row[:, None]
        if HAS_TAIL:
            is_word &= (block * 4 + words < num_blocks * 4)[None, :]
            is_number &= (block * 32 + columns < num_blocks * 32)[None, :]
        tile = tl.reshape(tl.load(word_ptrs, mask=is_word, other=0), [TILE_OUTPUTS, NUM_GROUPS, GROUP_WORDS])
        x = tl.load(x_ptrs, mask=is_number, other=0.0)
        # The next step's, ahead: loads this narrow are not made ahead by the compiler.
        next_group = (block + TILE_BLOCKS) // GROUP_BLOCKS
        is_group = is_output[:, None] & (next_group + groups < num_groups)[None, :]
        next_scales = tl.load(scales_ptr + scale_places + next_group, mask=is_group, other=0.0)
        scale = scales.to(CDT)[:, :, None]
        if minimums is None:
            shift = None
        else:
            shift = (minimums.to(tl.float32) + 8.0 * scales.to(tl.float32)).to(CDT)[:, :, None]
            minimums = tl.load(minimums_ptr + scale_places + next_group, mask=is_group, other=0.0)
        even = tl.join(
            dequantised_pair(tile, ones, scale, shift, 0, CDT), dequantised_pair(tile, ones, scale, shift, 2, CDT)
        )
        odd = tl.join(
            dequantised_pair(tile, ones, scale, shift, 1, CDT), dequantised_pair(tile, ones, scale, shift, 3, CDT)
        )
        # [outputs, block, word, half, j / 2, j % 2]; columns count j, then words, then halves.
        weights = tl.reshape(tl.join(even, odd), [TILE_OUTPUTS, TILE_BLOCKS, 4, 2, 2, 2])
        weights = tl.reshape(tl.permute(weights, (0, 1, 4, 5, 2, 3)), [TILE_OUTPUTS, TILE_COLUMNS])
        products = tl.dot(weights, tl.trans(x), products)
        x_ptrs += TILE_COLUMNS
        word_ptrs += 4 * TILE_BLOCKS
        scales = next_scales
    store_tile(products, bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output)


@triton.jit
def int4_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    minimums_ptr,
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
    """x: one row, as int32 pairs [16 * num_blocks]; out: [num_outputs].

    A quantum q becomes 1 + q / 16 or, where one shift serves two, 1 + q / 256, whose x is multiplied by 16. What is too
    much, for quanta that count from 8, is known from x alone, and is where the sums begin. All is divided by 16.
    """
    one += tl.program_id(2)
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = outputs < num_outputs
    blocks, words = tl.arange(0, TILE_BLOCKS), tl.arange(0, TILE_BLOCKS * 4)
    pairs = words // 4 * 16 + words % 4
    word_ptrs = words_ptr + outputs[:, None].to(tl.int64) * (num_blocks * 4) + words[None, :]
    scale_places = outputs[:, None].to(tl.int64) * (num_blocks // GROUP_BLOCKS)
    products = tl.zeros([TILE_OUTPUTS, TILE_BLOCKS * 4], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_word = block * 4 + words < num_blocks * 4
        tile = tl.load(word_ptrs + block * 4, mask=is_output[:, None] & is_word[None, :], other=0)
        places = scale_places + ((block + blocks) // GROUP_BLOCKS)[None, :]
        is_scale = is_output[:, None] & (block + blocks < num_blocks)[None, :]
        scales = tl.load(scales_ptr + places, mask=is_scale, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + block * 16 + pairs
        x0, x4 = float_pair(tl.load(x_ptrs, mask=is_word, other=0), CDT)
        x1, x5 = float_pair(tl.load(x_ptrs + 4, mask=is_word, other=0), CDT)
        x2, x6 = float_pair(tl.load(x_ptrs + 8, mask=is_word, other=0), CDT)
        x3, x7 = float_pair(tl.load(x_ptrs + 12, mask=is_word, other=0), CDT)
        even, odd = (x0 + x4) + (x2 + x6), (x1 + x5) + (x3 + x7)
        sums = tl.zeros_like(products) - (even * 16.5 + odd * 1.5)[None, :]
        sums += counted_up(tile << 15, one, 15, 4) * (x0 * 16.0)[None, :]
        sums += counted_up(tile << 15, one, 19, 4) * x1[None, :]
        sums += counted_up(tile << 7, one, 15, 4) * (x2 * 16.0)[None, :]
        sums += counted_up(tile << 7, one, 19, 4) * x3[None, :]
        sums += counted_up(tile >> 1, one, 15, 4) * (x4 * 16.0)[None, :]
        sums += counted_up(tile >> 1, one, 19, 4) * x5[None, :]
        sums += counted_up(tile >> 9, one, 15, 4) * (x6 * 16.0)[None, :]
        sums += counted_up(tile >> 9, one, 19, 4) * x7[None, :]
        products += sums * of_each_word(scales, 4)
        if minimums_ptr is not None:
            minimums = tl.load(minimums_ptr + places, mask=is_scale, other=0.0).to(tl.float32)
            products += (even + odd)[None, :] * of_each_word(minimums * 0.0625 + scales * 0.5, 4)
    product = tl.sum(products, axis=1) * 16.0
    if bias_ptr is not None:
        product += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
    tl.store(out_ptr + outputs, product.to(out_ptr.dtype.element_ty), mask=is_output)


def int4_gemm(x: Tensor, matrix: Int4Matrix, out: Tensor, *, is_deterministic: bool = False) -> Tensor:
    """x: 16-bit floats [T, K], out: floats [T, N]; rows may have strides. Returns `out`."""
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    tile = gemm_tile(num_rows, num_outputs, is_deterministic=is_deterministic)
    num_blocks = num_columns // BLOCK_COLUMNS
    int4_gemm_kernel[(tile.num_programs(num_rows, num_outputs),)](
        x,
        matrix.words,
        matrix.scales,
        matrix.minimums,
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


def int4_gemv(x: Tensor, matrix: Int4Matrix, out: Tensor) -> Tensor:
    """x: one row of 16-bit floats [1, K], out: floats [1, N]. Returns `out`."""
    num_outputs, num_columns = matrix.shape
    tile = gemv_tile(num_columns // BLOCK_COLUMNS)
    int4_gemv_kernel[(ceil_div(num_outputs, tile.outputs),)](
        x[0].view(torch.int32),
        matrix.words,
        matrix.scales,
        matrix.minimums,
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
