"""What comes between the q, k, v projection and attention, in one launch: QK-norm, RoPE, K and V into their blocks.

Specifications: `reference.rms_norm`, `reference.rope`, `reference_attention.kv_write`. Bound by memory: every number is
read once and written once, q where it was and K and V in the pool; what is between stays in float32 in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_blocks import KVBlocks
from .bits import float32_to_e4m3, float32_to_int8, magnitude_bits, scale_of
from .runtime import HALVES, ceil_div, check_tensor, next_power_of_two

TILE = 512
"""Numbers of either half of the heads that a program has: 8 a thread, 16 bytes. The same for all row counts: how a
head's sum of squares is split must not depend on them."""
NUM_WARPS = 2


@triton.jit
def store_rows(numbers_ptr, scales_ptr, first, second, places, scale_places, is_inside, is_head, half: tl.constexpr):
    """One row of K or V a head. first, second float32 [heads, width]: its halves; places: of the first."""
    dtype = numbers_ptr.dtype.element_ty
    if dtype == tl.int8 or dtype == tl.uint8:
        largest = tl.max(tl.maximum(magnitude_bits(first), magnitude_bits(second)), axis=1)
        if dtype == tl.int8:
            scale = scale_of(largest, 127.0)
            first = float32_to_int8(tl.div_rn(first, scale[:, None]))
            second = float32_to_int8(tl.div_rn(second, scale[:, None]))
        else:
            scale = scale_of(largest, 448.0)
            first = float32_to_e4m3(tl.div_rn(first, scale[:, None]))
            second = float32_to_e4m3(tl.div_rn(second, scale[:, None]))
        tl.store(scales_ptr + scale_places, scale, mask=is_head)
    tl.store(numbers_ptr + places, first.to(dtype), mask=is_inside)
    tl.store(numbers_ptr + places + half, second.to(dtype), mask=is_inside)


@triton.jit
def rotate_and_store_kernel(
    heads_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    norm_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    layer_offset,
    block_stride,
    head_stride,
    position_stride,
    scale_layer_offset,
    scale_block_stride,
    scale_head_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    half_width: tl.constexpr,
    tile: tl.constexpr,
    block_size: tl.constexpr,
    has_norm: tl.constexpr,
    has_rope: tl.constexpr,
):
    """Programs: rows, then tiles of heads: of q, of K, of V; a tile is of one kind."""
    num_query_tiles: tl.constexpr = (num_heads + tile - 1) // tile
    num_kv_tiles: tl.constexpr = (num_kv_heads + tile - 1) // tile
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    is_query = index < num_query_tiles
    is_value = index >= num_query_tiles + num_kv_tiles
    first_tile = tl.where(is_query, 0, tl.where(is_value, num_query_tiles + num_kv_tiles, num_query_tiles))
    head = (index - first_tile) * tile + tl.arange(0, tile)
    is_head = head < tl.where(is_query, num_heads, num_kv_heads)
    column = head + tl.where(is_query, 0, tl.where(is_value, num_heads + num_kv_heads, num_heads))
    dims = tl.arange(0, half_width)
    is_dim = dims < half
    is_inside = is_head[:, None] & is_dim[None, :]
    places = column[:, None] * (2 * half) + dims[None, :]
    source = heads_ptr + row * ((num_heads + 2 * num_kv_heads) * 2 * half) + places
    first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_inside, other=0.0).to(tl.float32)
    if not is_value:
        if has_norm:
            mean = tl.sum(first * first + second * second, axis=1) / (2 * half)
            factor = tl.rsqrt(mean + eps)[:, None]
            first = first * factor * tl.load(norm_ptr + places, mask=is_inside, other=0.0)
            second = second * factor * tl.load(norm_ptr + places + half, mask=is_inside, other=0.0)
        if has_rope:
            angle = tl.load(positions_ptr + row).to(tl.int64) * half + dims
            cos = tl.load(cos_ptr + angle, mask=is_dim, other=0.0)[None, :]
            sin = tl.load(sin_ptr + angle, mask=is_dim, other=0.0)[None, :]
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
    if is_query:
        if has_norm or has_rope:
            tl.store(source, first.to(heads_ptr.dtype.element_ty), mask=is_inside)
            tl.store(source + half, second.to(heads_ptr.dtype.element_ty), mask=is_inside)
    else:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            block = slot // block_size
            offset = slot % block_size
            target = layer_offset + block * block_stride + offset * position_stride
            targets = target + head[:, None] * head_stride + dims[None, :]
            scale_target = scale_layer_offset + block * scale_block_stride + offset
            scales = scale_target + head * scale_head_stride
            if is_value:
                store_rows(values_ptr, value_scales_ptr, first, second, targets, scales, is_inside, is_head, half)
            else:
                store_rows(keys_ptr, key_scales_ptr, first, second, targets, scales, is_inside, is_head, half)


def rotate_and_store(
    heads: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: KVBlocks,
    layer: int,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weight: Tensor | None,
    eps: float,
    has_rope: bool,
) -> None:
    """q is normed and rotated in place; K, normed and rotated, and V go to the rows' slots. K and V in `heads` stay.

    heads: 16-bit floats [T, (num_heads + 2 * num_kv_heads) * head_dim], q, k and v side by side. positions: int32 [T].
    cos, sin: float32 [max_positions, head_dim / 2]. slots: int64 [T], block * block_size + offset; negative: nothing is
    stored. norm_weight: float32 [num_heads + num_kv_heads, head_dim], or None where there is no QK-norm.
    A row that is not finite is stored so: as it is, or with a scale that is not finite.
    """
    head_dim = kv.keys.shape[-1]
    half = head_dim // 2
    _check(heads, positions, cos, sin, kv, slots, num_heads, num_kv_heads, norm_weight)
    if not len(heads):
        return
    half_width = next_power_of_two(half)
    tile = TILE // half_width
    scale_strides = (0, 0, 0) if kv.key_scales is None else kv.key_scales.stride()[:3]
    grid = (len(heads), ceil_div(num_heads, tile) + 2 * ceil_div(num_kv_heads, tile))
    rotate_and_store_kernel[grid](
        heads,
        positions,
        cos,
        sin,
        slots,
        norm_weight,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        layer * kv.keys.stride(1),
        kv.keys.stride(0),
        kv.keys.stride(2),
        kv.keys.stride(3),
        layer * scale_strides[1],
        scale_strides[0],
        scale_strides[2],
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        half=half,
        half_width=half_width,
        tile=tile,
        block_size=kv.block_size,
        has_norm=norm_weight is not None,
        has_rope=has_rope,
        num_warps=NUM_WARPS,
    )


def _check(
    heads: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: KVBlocks,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weight: Tensor | None,
) -> None:
    num_rows, head_dim, half = len(heads), kv.keys.shape[-1], kv.keys.shape[-1] // 2
    check_tensor("heads", heads, (num_rows, (num_heads + 2 * num_kv_heads) * head_dim), *HALVES)
    check_tensor("positions", positions, (num_rows,), torch.int32)
    check_tensor("slots", slots, (num_rows,), torch.int64)
    check_tensor("cos", cos, (len(cos), half), torch.float32)
    check_tensor("sin", sin, (len(cos), half), torch.float32)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (num_heads + num_kv_heads, head_dim), torch.float32)
    assert kv.keys.shape[2] == num_kv_heads, f"{num_kv_heads} KV heads, {kv.keys.shape[2]} in the pool"
    assert kv.keys.dtype in (*HALVES, torch.int8, torch.uint8), f"no kernel stores {kv.keys.dtype}"
    assert kv.keys.stride(-1) == 1, "the numbers of a position must lie together: keys by position"
    assert kv.keys.stride() == kv.values.stride(), "K and V have the same strides"
    assert (kv.key_scales is None) == (kv.keys.dtype in HALVES), f"8-bit rows have scales: {kv.keys.dtype}"
    if kv.key_scales is not None and kv.value_scales is not None:
        assert kv.key_scales.stride(-1) == 1, "the scales of a block's positions must lie together"
        assert kv.key_scales.stride() == kv.value_scales.stride(), "scales of K and V have the same strides"
