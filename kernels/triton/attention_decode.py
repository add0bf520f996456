"""Attention of single rows over block tables, split over the context: what a step of pure decoding needs.

A program takes one split of one sequence and one KV head: the query heads that share it are the rows of a matrix
product. Splits are cut at absolute positions, and partial results are combined in order, so a row's numbers depend
neither on its neighbours nor on the width of the table. The grid depends on shapes alone, as CUDA graphs want it: it
may have more programs than there are splits (they end at once), or fewer (each takes every n-th).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_blocks import KVBlocks
from .kv_load import LOWEST, attend_tile, check_blocks, check_out, load_tile, score_factors, to_scores, value_unit
from .runtime import ceil_div, next_power_of_two, register_limit

SPLIT_TOKENS = 512
"""Positions of a split. Part of what a row's bits depend on."""
MAX_PROGRAMS = 2048
"""Of a launch, where every sequence and KV head still gets one: several for each place that a large GPU has."""
COMBINED_SPLITS = 16
"""That the second kernel reads at once."""
NO_WINDOW = 1 << 30


class DecodeTile(NamedTuple):
    num_keys: int
    """Positions that a program reads at once: whole blocks, a whole fraction of SPLIT_TOKENS."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread, where the assembler would rather spill."""


TILES = {
    2: {64: DecodeTile(128, 4, 3), 128: DecodeTile(64, 4, 3), 256: DecodeTile(32, 4, 3, 255)},
    1: {64: DecodeTile(64, 4, 3, 255), 128: DecodeTile(32, 4, 3, 255), 256: DecodeTile(32, 4, 3, 255)},
}
"""By bytes of a stored number, then by head_dim rounded up to a power of two. What is read ahead is one tile, so
several programs must fit on a multiprocessor: registers decide for 8 bits, shared memory for 16."""


def paged_decode(
    queries: Tensor,
    kv: KVBlocks,
    layer: int,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
    max_splits: int | None = None,
) -> Tensor:
    """[S, num_heads, head_dim] float16 or bfloat16 -> same: one query row a sequence, at its last position.

    queries: a row's heads lie together, rows may be strided. block_tables int32 [S, max_blocks]: only blocks below the
    length are looked up. lengths int32 [S]: positions a row sees, its own too; 0 gives zeros. window: it sees only the
    last so many. max_splits: how many SPLIT_TOKENS the longest sequence has at most, where that is known to be less
    than the table's width says.
    """
    check_blocks(kv, queries)
    num_sequences, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = kv.keys.shape[2:4]
    max_blocks = block_tables.shape[1]
    assert block_tables.dtype == lengths.dtype == torch.int32
    assert block_tables.stride(1) == 1, "a sequence's blocks must lie together"
    assert len(block_tables) == len(lengths) == num_sequences
    out = torch.empty_like(queries, memory_format=torch.contiguous_format) if out is None else out
    check_out(out, queries)
    if num_sequences == 0:
        return out
    num_splits = max(1, ceil_div(max_blocks * block_size, SPLIT_TOKENS) if max_splits is None else max_splits)
    num_programs = min(num_splits, max(1, MAX_PROGRAMS // (num_sequences * num_kv_heads)))
    padded_dim = max(16, next_power_of_two(head_dim))
    tile = TILES[kv.keys.element_size()][max(64, padded_dim)]
    partials = queries.new_empty((num_sequences, num_heads, num_splits, head_dim), dtype=torch.float32)
    # Of each partial result its running maximum and its total of weights: two tensors, so that both begin at a
    # multiple of 16 bytes whatever their sizes, and a kernel has one form.
    maxima, totals = (queries.new_empty(partials.shape[:3], dtype=torch.float32) for _ in range(2))
    unit = value_unit(kv.keys.dtype, queries.dtype)
    score_scale, cap = score_factors(scale, unit, soft_cap)
    has_scales = kv.key_scales is not None
    is_mixed = not has_scales and kv.keys.dtype != queries.dtype
    decode_split_kernel[(num_kv_heads, num_programs, num_sequences)](
        queries,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        block_tables,
        lengths,
        partials,
        maxima,
        totals,
        score_scale,
        cap,
        layer,
        NO_WINDOW if window is None else window,
        num_splits,
        queries.stride(0),
        block_tables.stride(0),
        *kv.keys.stride()[:4],
        *((0, 0, 0) if kv.key_scales is None else kv.key_scales.stride()[:3]),
        GROUP=num_heads // num_kv_heads,
        GROUP_ROWS=max(16, next_power_of_two(num_heads // num_kv_heads)),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK=block_size,
        NUM_KEYS=tile.num_keys,
        SPLIT=SPLIT_TOKENS,
        HAS_SCALES=has_scales,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **register_limit(255 if is_mixed else tile.max_registers),
    )
    decode_combine_kernel[(num_heads, num_sequences)](
        partials,
        maxima,
        totals,
        lengths,
        out,
        unit,
        NO_WINDOW if window is None else window,
        num_splits,
        out.stride(0),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        SPLIT=SPLIT_TOKENS,
        NUM_COMBINED=COMBINED_SPLITS,
        num_warps=4 if padded_dim >= 128 else 2,
    )
    return out


def partial_bytes(num_sequences: int, num_heads: int, head_dim: int, max_tokens: int) -> int:
    """What `paged_decode` allocates for its partial results, beside its output."""
    return num_sequences * num_heads * ceil_div(max_tokens, SPLIT_TOKENS) * (head_dim + 2) * 4


@triton.jit(do_not_specialize=["layer", "window", "num_splits", "table_stride"])
def decode_split_kernel(
    queries,  # CDT [S, H, D]
    keys,
    values,  # [num_blocks, num_layers, KVH, BLOCK, D]
    key_scales,
    value_scales,  # float32 [num_blocks, num_layers, KVH, BLOCK] or None
    block_tables,  # int32 [S, max_blocks]
    lengths,  # int32 [S]
    partials,  # float32 [S, H, num_splits, D]: not divided by the total
    maxima,
    totals,  # float32 [S, H, num_splits]
    score_scale,
    soft_cap,
    layer,
    window,
    num_splits,
    query_stride,
    table_stride,
    block_stride,
    layer_stride,
    head_stride,
    position_stride,
    scale_block_stride,
    scale_layer_stride,
    scale_head_stride,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    first_seen = tl.maximum(length - window, 0)
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + group
    is_number = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = sequence.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(queries + query_offsets, mask=is_number, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    offset = layer * layer_stride + kv_head * head_stride
    scale_offset = layer * scale_layer_stride + kv_head * scale_head_stride
    pool = (keys, values, table, offset, block_stride, position_stride)
    scales = (key_scales, value_scales, scale_offset, scale_block_stride)
    for split in range(first_seen // SPLIT + tl.program_id(1), tl.cdiv(length, SPLIT), tl.num_programs(1)):
        maximum = tl.full([GROUP_ROWS], LOWEST, tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        attended = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
        begin = tl.maximum(split * SPLIT, first_seen // NUM_KEYS * NUM_KEYS)
        end = tl.minimum((split + 1) * SPLIT, length)
        for start in range(begin, end, NUM_KEYS):
            positions = start + tl.arange(0, NUM_KEYS)
            # All rows see the same positions: what is hidden is not even loaded, and its values and scales are 0.
            is_seen = (positions >= first_seen) & (positions < end)
            key, value, key_scale, value_scale = load_tile(
                pool, scales, positions, is_seen, query.dtype, HEAD_DIM, PADDED_DIM, BLOCK, HAS_SCALES, False
            )
            products = tl.dot(query, tl.trans(key))
            if HAS_SCALES:
                products *= key_scale[None, :]
            scores = to_scores(products, score_scale, soft_cap, HAS_SOFT_CAP)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            maximum, total, attended = attend_tile(
                scores, value, value_scale, is_seen[None, :], maximum, total, attended, HAS_SCALES, False
            )
        places = (sequence.to(tl.int64) * (tl.num_programs(0) * GROUP) + heads) * num_splits + split
        tl.store(partials + places[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_number)
        tl.store(maxima + places, maximum, mask=group < GROUP)
        tl.store(totals + places, total, mask=group < GROUP)


@triton.jit(do_not_specialize=["unit", "window", "num_splits"])
def decode_combine_kernel(
    partials,  # float32 [S, H, num_splits, D]
    maxima,
    totals,  # float32 [S, H, num_splits]
    lengths,  # int32 [S]
    out,  # CDT [S, H, D]
    unit,
    window,
    num_splits,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_COMBINED: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    first_split = tl.maximum(length - window, 0) // SPLIT
    end_split = tl.cdiv(length, SPLIT)
    dims = tl.arange(0, PADDED_DIM)
    first_place = (sequence * tl.num_programs(0) + head) * num_splits
    maximum = LOWEST
    total = 0.0
    attended = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(first_split // NUM_COMBINED * NUM_COMBINED, end_split, NUM_COMBINED):
        splits = start + tl.arange(0, NUM_COMBINED)
        is_used = (splits >= first_split) & (splits < end_split)
        places = first_place + splits
        is_number = is_used[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(partials + places[:, None] * HEAD_DIM + dims[None, :], mask=is_number, other=0.0)
        part_maximum = tl.load(maxima + places, mask=is_used, other=float("-inf"))
        part_total = tl.load(totals + places, mask=is_used, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=0))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(part_maximum - new_maximum)
        total = total * shrink + tl.sum(part_total * weights, axis=0)
        attended = attended * shrink + tl.sum(part * weights[:, None], axis=0)
        maximum = new_maximum
    result = attended * unit / tl.where(length > 0, total, 1.0)
    tl.store(
        out + sequence * out_stride + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM
    )
