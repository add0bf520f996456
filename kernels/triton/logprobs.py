"""Logprobs of the model's own distribution: of the drawn id, and the most likely ids, best first, the lower id of
equals before. float32: right to about 1e-5."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import ceil_div, next_power_of_two

TILE = 2048
MAX_NUM_TOP = 32
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST_KEY = tl.constexpr(-(2**63))
_ID_BITS = tl.constexpr(2**31 - 1)


@triton.jit
def to_keys(values, ids):
    """float32, int32 -> int64 that grow with the value and, among equals, fall with the id.

    The bits of a float grow with it; of a negative one they fall, so they are turned. -0 is 0.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (ids ^ _ID_BITS).to(tl.int64)


@triton.jit
def key_values(keys):
    """The value of `to_keys`."""
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_top"])
def measure_logprobs_kernel(
    logits,
    logits_stride,
    logit_rows,
    bests,
    sums,
    keys_of_best,
    num_top,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_NUM_TOP: tl.constexpr,
):
    """Of a tile: its best logit, the sum of exp(logit - best), and the keys of its `num_top` best, falling."""
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    is_id = ids < vocab_size
    logit_row = tl.load(logit_rows + row)
    values = tl.load(logits + logit_row * logits_stride + ids, mask=is_id, other=float("-inf"))
    best = tl.max(values, axis=0)
    at = row * NUM_TILES + tile
    tl.store(bests + at, best)
    distance = tl.where(values > float("-inf"), (best - values) * _LOG2_E, float("inf"))
    tl.store(sums + at, tl.sum(tl.exp2(-distance), axis=0))
    keys = tl.where(is_id, to_keys(values, ids), _LOWEST_KEY)
    for index in range(num_top):
        key = tl.max(keys, axis=0)
        tl.store(keys_of_best + at * MAX_NUM_TOP + index, key)
        keys = tl.where(keys == key, _LOWEST_KEY, keys)


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    logits,
    logits_stride,
    logit_rows,
    drawn_rows,
    token_ids,
    bests,
    sums,
    keys_of_best,
    drawn_logprobs,
    top_ids,
    top_logprobs,
    num_top,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_NUM_TOP: tl.constexpr,
):
    """A row's results from those of its tiles."""
    row = tl.program_id(0)
    tiles = tl.arange(0, NUM_TILES)
    is_tile = tiles * TILE < vocab_size
    tile_bests = tl.load(bests + row * NUM_TILES + tiles, mask=is_tile, other=float("-inf"))
    best = tl.max(tile_bests, axis=0)
    tile_sums = tl.load(sums + row * NUM_TILES + tiles, mask=is_tile, other=0.0)
    distance = tl.where(tile_bests > float("-inf"), (best - tile_bests) * _LOG2_E, float("inf"))
    log_sum = tl.log2(tl.sum(tile_sums * tl.exp2(-distance), axis=0)) * _LN_2
    token_id = tl.load(token_ids + tl.load(drawn_rows + row))
    drawn = tl.load(logits + tl.load(logit_rows + row) * logits_stride + token_id)
    tl.store(drawn_logprobs + row, drawn - best - log_sum)
    if num_top > 0:
        indices = tl.arange(0, MAX_NUM_TOP)
        cells = (row * NUM_TILES + tiles[:, None]) * MAX_NUM_TOP + indices[None, :]
        keys = tl.load(keys_of_best + cells, mask=is_tile[:, None] & (indices[None, :] < num_top), other=_LOWEST_KEY)
        for index in range(num_top):
            key = tl.max(tl.max(keys, axis=1), axis=0)
            tl.store(top_ids + row * num_top + index, (key & _ID_BITS).to(tl.int32) ^ _ID_BITS)
            tl.store(top_logprobs + row * num_top + index, key_values(key) - best - log_sum)
            keys = tl.where(keys == key, _LOWEST_KEY, keys)


def raw_logprobs(
    logits: Tensor,
    logit_rows: Tensor,
    drawn_rows: Tensor,
    token_ids: Tensor,
    vocab_size: int,
    drawn_logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    tile: int = TILE,
) -> None:
    """Fills drawn_logprobs float32 [L], top_ids int32 [L, n] and top_logprobs float32 [L, n], n at most 32 and at most
    vocab_size.

    logits: float32 [any, vocab_size or more]; logit_rows: int64 [L], which of them; token_ids: int32 [R];
    drawn_rows: int64 [L], which of the token ids was drawn there.
    """
    (num_rows, num_top), device = top_ids.shape, logits.device
    assert num_top <= min(MAX_NUM_TOP, vocab_size), f"{num_top} best of {vocab_size} ids, {MAX_NUM_TOP} at most"
    assert top_ids.is_contiguous()
    assert top_logprobs.is_contiguous()
    assert logits.stride(1) == 1, "a row's logits lie together"
    assert logit_rows.dtype == drawn_rows.dtype == torch.int64
    num_tiles = ceil_div(vocab_size, tile)
    width = next_power_of_two(num_tiles)
    bests = torch.empty((num_rows, width), dtype=torch.float32, device=device)
    sums = torch.empty_like(bests)
    keys = torch.empty((num_rows, width, MAX_NUM_TOP), dtype=torch.int64, device=device)
    cut: dict[str, Any] = {"NUM_TILES": width, "TILE": tile, "MAX_NUM_TOP": MAX_NUM_TOP}
    kernel: Any = measure_logprobs_kernel
    kernel[(num_tiles, num_rows)](
        logits, logits.stride(0), logit_rows, bests, sums, keys, num_top, vocab_size, **cut, num_warps=4
    )
    kernel = logprobs_kernel
    kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logit_rows,
        drawn_rows,
        token_ids,
        bests,
        sums,
        keys,
        drawn_logprobs,
        top_ids,
        top_logprobs,
        num_top,
        vocab_size,
        **cut,
        num_warps=8,
    )
