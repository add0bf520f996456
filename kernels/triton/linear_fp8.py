"""Products of 16-bit activations with fp8 matrices: one row without tensor cores, any number of rows with them.

Cards from sm_89 on convert fp8 themselves; older ones, and where that takes more instructions, move the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arch import cuda_arch
from .gemm_tiles import gemm_tile, store_tile, tile_origin
from .gemv_tiles import gemv_tile
from .matrices import BLOCK_COLUMNS, Fp8Matrix
from .runtime import TL_DTYPES, ceil_div
from .weight_bits import FP8_FACTOR, float_pair, fp8_pair

NATIVE_FROM = {torch.float16: 89, torch.bfloat16: 100}
"""Compute dtype -> the first architecture that converts fp8 to it in fewer instructions than moving bits takes."""


@triton.jit(do_not_specialize=["num_rows"])
def fp8_gemm_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    x_stride,
    out_stride,
    IS_NATIVE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """x: [num_rows, 32 * num_blocks], out: [num_rows, num_outputs], both with strides.

    numbers: float8e4nv where IS_NATIVE, else int32 words of four.
    """
    CDT: tl.constexpr = x_ptr.dtype.element_ty
    TILE_COLUMNS: tl.constexpr = 32 * TILE_BLOCKS
    TILE_WIDTH: tl.constexpr = TILE_COLUMNS if IS_NATIVE else TILE_COLUMNS // 4
    first_row, first_output = tile_origin(num_rows, num_outputs, TILE_ROWS, TILE_OUTPUTS)
    rows, outputs = first_row + tl.arange(0, TILE_ROWS), first_output + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    columns, places = tl.arange(0, TILE_COLUMNS), tl.arange(0, TILE_WIDTH)
    width = num_blocks * (32 if IS_NATIVE else 8)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :]
    number_ptrs = numbers_ptr + outputs[:, None].to(tl.int64) * width + places[None, :]
    products = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_weight, is_number = is_output[:, None], is_row[:, None]
        if HAS_TAIL:
            is_weight &= (block * (TILE_WIDTH // TILE_BLOCKS) + places < width)[None, :]
            is_number &= (block * 32 + columns < num_blocks * 32)[None, :]
        x = tl.load(x_ptrs, mask=is_number, other=0.0)
        if IS_NATIVE:
            weights = tl.load(number_ptrs, mask=is_weight, other=0.0).to(CDT)
        else:
            words = tl.load(number_ptrs, mask=is_weight, other=0)
            byte_0, byte_2 = fp8_pair(words, 0, CDT)
            byte_1, byte_3 = fp8_pair(words, 1, CDT)
            weights = tl.join(tl.join(byte_0, byte_2), tl.join(byte_1, byte_3))
            weights = tl.reshape(weights, [TILE_OUTPUTS, TILE_COLUMNS])
        products = tl.dot(weights, tl.trans(x), products)
        x_ptrs += TILE_COLUMNS
        number_ptrs += TILE_WIDTH
    scales = tl.load(scales_ptr + outputs, mask=is_output, other=0.0)
    if not IS_NATIVE and tl.float16 == CDT:
        products *= FP8_FACTOR
    store_tile(products * scales[:, None], bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output)


@triton.jit
def fp8_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_blocks,
    CDT: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """x: one row, four numbers an int64 [8 * num_blocks]; out: [num_outputs]."""
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = outputs < num_outputs
    words = tl.arange(0, TILE_BLOCKS * 8)
    word_ptrs = words_ptr + outputs[:, None].to(tl.int64) * (num_blocks * 8) + words[None, :]
    products = tl.zeros([TILE_OUTPUTS, TILE_BLOCKS * 8], tl.float32)
    for block in range(0, num_blocks, TILE_BLOCKS):
        is_word = block * 8 + words < num_blocks * 8
        tile = tl.load(word_ptrs + block * 8, mask=is_output[:, None] & is_word[None, :], other=0)
        x = tl.load(x_ptr + block * 8 + words, mask=is_word, other=0)
        x0, x1 = float_pair(x.to(tl.int32), CDT)
        x2, x3 = float_pair((x >> 32).to(tl.int32), CDT)
        byte_0, byte_2 = fp8_pair(tile, 0, tl.float16)
        byte_1, byte_3 = fp8_pair(tile, 1, tl.float16)
        products += byte_0.to(tl.float32) * x0[None, :]
        products += byte_1.to(tl.float32) * x1[None, :]
        products += byte_2.to(tl.float32) * x2[None, :]
        products += byte_3.to(tl.float32) * x3[None, :]
    scales = tl.load(scales_ptr + outputs, mask=is_output, other=0.0)
    product = tl.sum(products, axis=1) * FP8_FACTOR * scales
    if bias_ptr is not None:
        product += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
    tl.store(out_ptr + outputs, product.to(out_ptr.dtype.element_ty), mask=is_output)


def fp8_gemm(
    x: Tensor, matrix: Fp8Matrix, out: Tensor, *, is_deterministic: bool = False, is_native: bool | None = None
) -> Tensor:
    """x: 16-bit floats [T, K], out: floats [T, N]; rows may have strides. Returns `out`.

    is_native: fp8 is converted by the card; None: where it does so better. It changes no bit.
    """
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    tile = gemm_tile(num_rows, num_outputs, is_deterministic=is_deterministic)
    if is_native is None:
        is_native = cuda_arch() >= NATIVE_FROM[x.dtype]
    num_blocks = num_columns // BLOCK_COLUMNS
    fp8_gemm_kernel[(tile.num_programs(num_rows, num_outputs),)](
        x,
        matrix.values.view(torch.float8_e4m3fn if is_native else torch.int32),
        matrix.scales,
        matrix.bias,
        out,
        num_rows,
        num_outputs,
        num_blocks,
        x.stride(0),
        out.stride(0),
        IS_NATIVE=is_native,
        **tile.options(num_blocks),
    )
    return out


def fp8_gemv(x: Tensor, matrix: Fp8Matrix, out: Tensor) -> Tensor:
    """x: one row of 16-bit floats [1, K], out: floats [1, N]. Returns `out`."""
    num_outputs, num_columns = matrix.shape
    tile = gemv_tile(num_columns // BLOCK_COLUMNS)
    fp8_gemv_kernel[(ceil_div(num_outputs, tile.outputs),)](
        x[0].view(torch.int64),
        matrix.values.view(torch.int32),
        matrix.scales,
        matrix.bias,
        out,
        num_outputs,
        num_columns // BLOCK_COLUMNS,
        CDT=TL_DTYPES[x.dtype],
        TILE_OUTPUTS=tile.outputs,
        TILE_BLOCKS=tile.blocks,
        num_warps=tile.num_warps,
    )
    return out
