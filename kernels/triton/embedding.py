"""Rows of the token table as the hidden numbers, from every kind of matrix. Specification: `reference.embedding`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bits import e4m3_to_float16
from .matrices import DeviceMatrix, Fp8Matrix, FpMatrix, Int4Matrix, Int8Matrix
from .runtime import ceil_div, check_tensor

TILE = 1024
"""Columns of a program."""
NUM_WARPS = 4


@triton.jit
def token_place(token_ids_ptr, num_tokens: tl.constexpr, num_columns: tl.constexpr, tile: tl.constexpr):
    """This program's row, token, columns and which of those are to be loaded. Programs: rows, then tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    is_wanted = (columns < num_columns) & (token >= 0) & (token < num_tokens)
    return row, token, columns, is_wanted


@triton.jit
def store_hidden(numbers, out_ptr, row, token, columns, num_tokens: tl.constexpr, num_columns: tl.constexpr):
    """A negative token is padding: zeros. One that the table does not have: NaN, which whoever asked is told of."""
    numbers = tl.where(token < 0, 0.0, tl.where(token < num_tokens, numbers, float("nan")))
    tl.store(out_ptr + row * num_columns + columns, numbers, mask=columns < num_columns)


@triton.jit
def embed_float_kernel(
    token_ids_ptr,
    values_ptr,
    scales_ptr,
    out_ptr,
    num_tokens: tl.constexpr,
    num_columns: tl.constexpr,
    tile: tl.constexpr,
):
    """values: [num_tokens, num_columns], 16-bit floats, or uint8 e4m3fn with scales float32 [num_tokens]."""
    row, token, columns, is_wanted = token_place(token_ids_ptr, num_tokens, num_columns, tile)
    stored = tl.load(values_ptr + token * num_columns + columns, mask=is_wanted, other=0)
    if values_ptr.dtype.element_ty == tl.uint8:
        scale = tl.load(scales_ptr + token, mask=(token >= 0) & (token < num_tokens), other=0.0)
        numbers = e4m3_to_float16(stored).to(tl.float32) * scale
    else:
        numbers = stored.to(tl.float32)
    store_hidden(numbers, out_ptr, row, token, columns, num_tokens, num_columns)


@triton.jit
def embed_int8_kernel(
    token_ids_ptr,
    quanta_ptr,
    scales_ptr,
    out_ptr,
    num_tokens: tl.constexpr,
    num_columns: tl.constexpr,
    group_size: tl.constexpr,
    tile: tl.constexpr,
):
    """An Int8Matrix."""
    row, token, columns, is_wanted = token_place(token_ids_ptr, num_tokens, num_columns, tile)
    quanta = tl.load(quanta_ptr + token * num_columns + columns, mask=is_wanted, other=0)
    groups = token * (num_columns // group_size) + columns // group_size
    numbers = quanta.to(tl.float32) * tl.load(scales_ptr + groups, mask=is_wanted, other=0.0).to(tl.float32)
    store_hidden(numbers, out_ptr, row, token, columns, num_tokens, num_columns)


@triton.jit
def embed_int4_kernel(
    token_ids_ptr,
    words_ptr,
    scales_ptr,
    minimums_ptr,
    out_ptr,
    num_tokens: tl.constexpr,
    num_columns: tl.constexpr,
    group_size: tl.constexpr,
    has_minimums: tl.constexpr,
    tile: tl.constexpr,
):
    """An Int4Matrix, whose documentation says where a column's quantum lies."""
    row, token, columns, is_wanted = token_place(token_ids_ptr, num_tokens, num_columns, tile)
    words = token * (num_columns // 8) + (columns // 32) * 4 + (columns % 8) // 2
    shifts = (columns % 32) // 8 * 4 + (columns % 2) * 16
    quanta = ((tl.load(words_ptr + words, mask=is_wanted, other=0) >> shifts) & 15).to(tl.float32)
    groups = token * (num_columns // group_size) + columns // group_size
    scales = tl.load(scales_ptr + groups, mask=is_wanted, other=0.0).to(tl.float32)
    if has_minimums:
        numbers = scales * quanta + tl.load(minimums_ptr + groups, mask=is_wanted, other=0.0).to(tl.float32)
    else:
        numbers = scales * (quanta - 8.0)
    store_hidden(numbers, out_ptr, row, token, columns, num_tokens, num_columns)


def embed(token_ids: Tensor, table: DeviceMatrix) -> Tensor:
    """int32 or int64 [T] -> float32 [T, hidden_size]: the tokens' rows of the table.

    A negative id gives zeros, one past the table NaN. Raises TypeError for a kind of matrix that is no table.
    """
    num_tokens, num_columns = table.shape
    check_tensor("token_ids", token_ids, (len(token_ids),), torch.int32, torch.int64)
    out = torch.empty(len(token_ids), num_columns, dtype=torch.float32, device=token_ids.device)
    if not len(token_ids):
        return out
    grid = (len(token_ids), ceil_div(num_columns, TILE))
    shape: dict[str, Any] = {"num_tokens": num_tokens, "num_columns": num_columns, "tile": TILE, "num_warps": NUM_WARPS}
    match table:
        case FpMatrix(values):
            embed_float_kernel[grid](token_ids, values, None, out, **shape)
        case Fp8Matrix(values, scales):
            embed_float_kernel[grid](token_ids, values, scales, out, **shape)
        case Int8Matrix(quanta, scales, group_size):
            embed_int8_kernel[grid](token_ids, quanta, scales, out, group_size=group_size, **shape)
        case Int4Matrix(words, scales, minimums, group_size):
            has_minimums = minimums is not None
            options = {"group_size": group_size, "has_minimums": has_minimums, **shape}
            embed_int4_kernel[grid](token_ids, words, scales, minimums, out, **options)
        case _:
            raise TypeError(f"tokens have no rows in a {type(table).__name__}")
    return out
