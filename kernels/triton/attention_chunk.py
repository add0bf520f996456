"""Attention over block tables for any mix of prefill chunks and single rows, in one launch.

A program takes a tile of one sequence and one KV head: as many rows as fit, times the query heads that share the KV
head, are the rows of its matrix products, so that K and V are read once for the whole group and a single row fills the
tile as well as its group can. Tiles of keys start at absolute 0 and run in order; one that a row sees nothing of leaves
that row's bits alone. So, with one shape of tile, a row's numbers depend neither on its neighbours, nor on how its
prompt was cut into chunks, nor on the width of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_blocks import KVBlocks
from .chunk_tiles import SMALL_ROWS, chunk_tile
from .kv_load import LOWEST, attend_tile, check_blocks, check_out, load_tile, score_factors, to_scores, value_unit
from .runtime import next_power_of_two, register_limit


def paged_chunk(
    queries: Tensor,
    kv: KVBlocks,
    layer: int,
    block_tables: Tensor,
    cu_rows: Tensor,
    start_positions: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
    is_deterministic: bool = False,
) -> Tensor:
    """[T, num_heads, head_dim] float16 or bfloat16 -> same: rows of S sequences, one after another.

    queries: a row's heads lie together, rows may be strided. block_tables int32 [S, max_blocks]. cu_rows int32 [S + 1]:
    where each sequence's rows start, and where the last one's end; rows behind that get zeros. start_positions int32
    [S]: absolute position of a sequence's first row; the row at position p sees p and all before, or the last `window`
    of them. max_rows: the most rows of a sequence. is_deterministic: one shape of tile for all row counts.
    """
    check_blocks(kv, queries)
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = kv.keys.shape[2:4]
    num_sequences = len(block_tables)
    assert block_tables.dtype == cu_rows.dtype == start_positions.dtype == torch.int32
    assert block_tables.stride(1) == 1, "a sequence's blocks must lie together"
    assert len(cu_rows) - 1 == len(start_positions) == num_sequences
    out = torch.empty_like(queries, memory_format=torch.contiguous_format) if out is None else out
    check_out(out, queries)
    if num_rows == 0:
        return out
    group = num_heads // num_kv_heads
    padded_dim = max(16, next_power_of_two(head_dim))
    is_small = max_rows * group <= SMALL_ROWS and not is_deterministic
    tile = chunk_tile(kv.keys.element_size(), head_dim, is_small=is_small)
    unit = value_unit(kv.keys.dtype, queries.dtype)
    score_scale, cap = score_factors(scale, unit, soft_cap)
    has_scales = kv.key_scales is not None
    # Each sequence, and the rows behind the last, may have one tile that is not full.
    num_tiles = num_rows // (tile.num_rows // group) + num_sequences + 1
    chunk_kernel[(num_tiles, num_kv_heads)](
        queries,
        kv.keys,
        kv.values,
        kv.key_scales,
        kv.value_scales,
        block_tables,
        cu_rows,
        start_positions,
        out,
        score_scale,
        cap,
        unit,
        layer,
        0 if window is None else window,
        num_sequences,
        num_rows,
        queries.stride(0),
        out.stride(0),
        block_tables.stride(0),
        *kv.keys.stride()[:4],
        *((0, 0, 0) if kv.key_scales is None else kv.key_scales.stride()[:3]),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK=block_size,
        NUM_ROWS=tile.num_rows,
        NUM_KEYS=tile.num_keys,
        HAS_SCALES=has_scales,
        HAS_WINDOW=window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # Products and sums rounded one by one: a tile of keys must give a row the same bits in both loops.
        enable_fp_fusion=False,
        **register_limit(tile.max_registers),
    )
    return out


@triton.jit
def find_sequence(tile, cu_rows, num_sequences, num_rows, ROWS: tl.constexpr, NUM_READ: tl.constexpr):
    """The sequence of a tile, its first row, the row behind its last, and the first row of the tile.

    Sequence s has the tiles from cu_rows[s] // ROWS + s to the same of s + 1, of which the last may be empty: so no
    program needs the number of tiles of all sequences before. The rows behind the last sequence are one more.
    """
    count = 0
    for start in range(0, num_sequences + 1, NUM_READ):
        sequences = start + tl.arange(0, NUM_READ)
        first_rows = tl.load(cu_rows + sequences, mask=sequences <= num_sequences, other=0)
        is_begun = (sequences <= num_sequences) & (first_rows // ROWS + sequences <= tile)
        count += tl.sum(is_begun.to(tl.int32), axis=0)
    sequence = count - 1
    first_row = tl.load(cu_rows + sequence)
    end_row = tl.load(cu_rows + sequence + 1, mask=sequence < num_sequences, other=num_rows)
    return sequence, first_row, end_row, first_row + (tile - first_row // ROWS - sequence) * ROWS


@triton.jit
def attend_keys(
    start,
    end,
    query,
    row_positions,
    state,
    pool,
    scales,
    score_scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_BORDER: tl.constexpr,
):
    """`state` after the tile of keys from position `start`. IS_BORDER: some rows may not see all of it, else all do.

    A value that is not finite would spread to rows that do not see it (0 * NaN): in a border it is set to 0, and rows
    that see it are marked in `is_poisoned`.
    """
    maximum, total, attended, is_poisoned = state
    positions = start + tl.arange(0, NUM_KEYS)
    is_there = positions < end
    key, value, key_scale, value_scale = load_tile(
        pool, scales, positions, is_there, query.dtype, HEAD_DIM, PADDED_DIM, BLOCK, HAS_SCALES, not IS_BORDER
    )
    products = tl.dot(query, tl.trans(key))
    if HAS_SCALES:
        products *= key_scale[None, :]
    scores = to_scores(products, score_scale, soft_cap, HAS_SOFT_CAP)
    is_seen = is_there[None, :]
    if IS_BORDER:
        INFINITY: tl.constexpr = 0x7C00 if query.dtype == tl.float16 else 0x7F80
        is_seen = positions[None, :] <= row_positions[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (positions[None, :] > row_positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        if not HAS_SCALES:
            is_bad = tl.max(value.to(tl.int16, bitcast=True) & 0x7FFF, axis=1) >= INFINITY
            value = tl.where(is_bad[:, None], 0.0, value)
            is_poisoned |= tl.max((is_seen & is_bad[None, :]).to(tl.int32), axis=1)
    maximum, total, attended = attend_tile(
        scores, value, value_scale, is_seen, maximum, total, attended, HAS_SCALES, IS_BORDER
    )
    return maximum, total, attended, is_poisoned


@triton.jit(do_not_specialize=["unit", "layer", "window", "num_sequences", "num_rows", "table_stride"])
def chunk_kernel(
    queries,  # CDT [T, H, D]
    keys,
    values,  # [num_blocks, num_layers, KVH, BLOCK, D]
    key_scales,
    value_scales,  # float32 [num_blocks, num_layers, KVH, BLOCK] or None
    block_tables,  # int32 [S, max_blocks]
    cu_rows,  # int32 [S + 1]
    start_positions,  # int32 [S]
    out,  # CDT [T, H, D]
    score_scale,
    soft_cap,
    unit,
    layer,
    window,
    num_sequences,
    num_rows,
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    layer_stride,
    head_stride,
    position_stride,
    scale_block_stride,
    scale_layer_stride,
    scale_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    ROWS: tl.constexpr = NUM_ROWS // GROUP
    # The last tiles see most: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, first_row, end_row, tile_row = find_sequence(tile, cu_rows, num_sequences, num_rows, ROWS, 32)
    if tile_row < end_row:
        packed = tl.arange(0, NUM_ROWS)
        dims = tl.arange(0, PADDED_DIM)
        rows = tile_row + packed // GROUP
        heads = kv_head * GROUP + packed % GROUP
        is_row = (packed < ROWS * GROUP) & (rows < end_row)
        is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        row_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        query_offsets = rows.to(tl.int64)[:, None] * query_stride + row_offsets
        query = tl.load(queries + query_offsets, mask=is_number, other=0.0)
        # The rows behind the last sequence have no keys.
        is_sequence = sequence < num_sequences
        start_position = tl.load(start_positions + sequence, mask=is_sequence, other=0)
        first_position = start_position + tile_row - first_row
        last_position = start_position + tl.minimum(tile_row + ROWS, end_row) - 1 - first_row
        row_positions = start_position + rows - first_row
        end = tl.where(is_sequence, last_position + 1, 0)
        begin = 0
        whole_begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first_position - window + 1, 0) // NUM_KEYS * NUM_KEYS
            whole_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), NUM_KEYS) * NUM_KEYS
        whole_end = tl.where(is_sequence, (first_position + 1) // NUM_KEYS * NUM_KEYS, 0)
        table = block_tables + tl.where(is_sequence, sequence, 0).to(tl.int64) * table_stride
        offset = layer * layer_stride + kv_head * head_stride
        scale_offset = layer * scale_layer_stride + kv_head * scale_head_stride
        pool = (keys, values, table, offset, block_stride, position_stride)
        scales = (key_scales, value_scales, scale_offset, scale_block_stride)
        maximum = tl.full([NUM_ROWS], LOWEST, tl.float32)
        total = tl.zeros([NUM_ROWS], tl.float32)
        attended = tl.zeros([NUM_ROWS, PADDED_DIM], tl.float32)
        state = (maximum, total, attended, tl.zeros([NUM_ROWS], tl.int32))
        if HAS_WINDOW:
            for start in tl.range(begin, tl.minimum(whole_begin, end), NUM_KEYS, num_stages=1):
                state = attend_keys(
                    start, end, query, row_positions, state, pool, scales, score_scale, soft_cap, window,
                    HEAD_DIM, PADDED_DIM, BLOCK, NUM_KEYS, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP, True,
                )  # fmt: skip
        for start in range(whole_begin, whole_end, NUM_KEYS):
            state = attend_keys(
                start, end, query, row_positions, state, pool, scales, score_scale, soft_cap, window,
                HEAD_DIM, PADDED_DIM, BLOCK, NUM_KEYS, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP, False,
            )  # fmt: skip
        for start in tl.range(tl.maximum(whole_begin, whole_end), end, NUM_KEYS, num_stages=1):
            state = attend_keys(
                start, end, query, row_positions, state, pool, scales, score_scale, soft_cap, window,
                HEAD_DIM, PADDED_DIM, BLOCK, NUM_KEYS, HAS_SCALES, HAS_WINDOW, HAS_SOFT_CAP, True,
            )  # fmt: skip
        maximum, total, attended, is_poisoned = state
        result = attended * unit / tl.where(is_sequence, total, 1.0)[:, None]
        result = tl.where(is_poisoned[:, None] > 0, float("nan"), result)
        out_offsets = rows.to(tl.int64)[:, None] * out_stride + row_offsets
        tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=is_number)
