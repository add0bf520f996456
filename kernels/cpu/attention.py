"""Paged attention on the CPU: sequences of one row in one batch, longer ones query tile by query tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..reference_attention import SequenceSpan
from .pool import PoolRows
from .threads import single_thread
from .tiles import KEY_TILE, MAX_QUERY_ROWS, TileProducts, TileResult, combine

MAX_GATHERED_BYTES = 8 << 20
"""K and V that one pass holds beside the pool: what a last-level cache can keep."""
SINGLE_THREAD_BYTES = 1 << 20
"""K and V of a step's single rows that one thread reads in less time than it takes to wake another."""


class TiledKeys:
    """The key tiles of one sequence that a window lets its rows see."""

    def __init__(self, pool: PoolRows, span: SequenceSpan, window: int | None):
        self.first_tile = first_visible_tile(span.start_position, window)
        blocks_per_tile = KEY_TILE // pool.block_size
        last_tile = (span.end_position - 1) // KEY_TILE
        num_tiles = last_tile - self.first_tile + 1
        blocks = list(span.block_table[self.first_tile * blocks_per_tile : (last_tile + 1) * blocks_per_tile])
        # Past the end any block of the sequence will do: those positions are hidden, and its numbers are finite
        # if the sequence's own are.
        blocks += [blocks[0]] * (num_tiles * blocks_per_tile - len(blocks))
        rows = pool.rows_of(torch.tensor(blocks)).unflatten(2, (num_tiles, blocks_per_tile))
        self.rows = rows.transpose(3, 4).contiguous()
        """int64 [planes, 2 (K and V), tiles, num_kv_heads, blocks of a tile]"""
        self.num_tiles = num_tiles


def first_visible_tile(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1) // KEY_TILE


def hidden_positions(query_positions: Tensor, tiles: Tensor, window: int | None) -> Tensor:
    """int64 [items or 1, queries], [items] -> bool [items, queries, KEY_TILE]: True where a query may not look."""
    key_positions = tiles.unsqueeze(-1) * KEY_TILE + torch.arange(KEY_TILE)
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(1)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def item_bytes(pool: PoolRows) -> int:
    """K and V of one key tile, gathered."""
    return 2 * pool.num_kv_heads * KEY_TILE * pool.head_dim * torch.float32.itemsize


def pieces(num_items: int, pool: PoolRows) -> Iterator[slice]:
    """Items in runs whose K and V fit MAX_GATHERED_BYTES."""
    size = max(1, MAX_GATHERED_BYTES // item_bytes(pool))
    return (slice(start, min(start + size, num_items)) for start in range(0, num_items, size))


class SingleRows:
    """All sequences of the step that have one row: each (sequence, key tile) is an item of one batch."""

    def __init__(self, pool: PoolRows, spans: Sequence[SequenceSpan], rows: Sequence[int], window: int | None):
        keyed = [(TiledKeys(pool, span, window), span, row) for span, row in zip(spans, rows, strict=True)]
        keyed.sort(key=lambda entry: -entry[0].num_tiles)
        ranks = range(keyed[0][0].num_tiles)
        items = [
            (query, keys, rank) for rank in ranks for query, (keys, _, _) in enumerate(keyed) if rank < keys.num_tiles
        ]
        self.pool = pool
        self.rows = torch.tensor([row for _, _, row in keyed])
        self.rank_sizes = [sum(rank < keys.num_tiles for keys, _, _ in keyed) for rank in ranks]
        self.item_query = torch.tensor([query for query, _, _ in items])
        self.item_rows = torch.stack([keys.rows[:, :, rank] for _, keys, rank in items], dim=2)
        tiles = torch.tensor([keys.first_tile + rank for _, keys, rank in items])
        positions = torch.tensor([span.start_position for _, span, _ in keyed])[self.item_query]
        self.hidden = hidden_positions(positions.unsqueeze(1), tiles, window).unsqueeze(1)
        """bool [items, 1, 1, KEY_TILE]"""

    def attend(self, products: TileProducts, layer: int, queries: Tensor, outputs: Tensor) -> None:
        """Fill the rows of `outputs` [T, num_heads, head_dim] that belong to these sequences."""
        with single_thread(len(self.item_query) * item_bytes(self.pool) <= SINGLE_THREAD_BYTES):
            self._attend(products, layer, queries, outputs)

    def _attend(self, products: TileProducts, layer: int, queries: Tensor, outputs: Tensor) -> None:
        num_heads, head_dim = queries.shape[1:]
        shape = (len(self.rows), self.pool.num_kv_heads, num_heads // self.pool.num_kv_heads, head_dim)
        own = products.pad_rows(queries.index_select(0, self.rows).view(shape))
        parts = []
        for piece in pieces(len(self.item_query), self.pool):
            keys, values = self.pool.gather(layer, self.item_rows[:, :, piece])
            item_queries = own.index_select(0, self.item_query[piece])
            parts.append(products.attend(item_queries, keys, values, self.hidden[piece], 0))
        joined = combine(join(parts), self.item_query, self.rank_sizes)
        outputs.index_copy_(0, self.rows, joined[:, :, : shape[2]].reshape(-1, num_heads, head_dim))


class QueryTile:
    """Neighbouring rows of one sequence, few enough for one product."""

    def __init__(
        self, keys: TiledKeys, first_row: int, start_position: int, num_rows: int, group: int, window: int | None
    ):
        self.first_row = first_row
        self.num_rows = num_rows
        first_tile = first_visible_tile(start_position, window)
        last_tile = (start_position + num_rows - 1) // KEY_TILE
        self.items = slice(first_tile - keys.first_tile, last_tile + 1 - keys.first_tile)
        # Tiles that end before the first row are seen whole, unless a window cuts them.
        first_cut = first_tile if window is not None else start_position // KEY_TILE
        self.first_hidden = first_cut - first_tile
        tiles = torch.arange(first_cut, last_tile + 1)
        positions = torch.arange(start_position, start_position + num_rows).repeat_interleave(group).unsqueeze(0)
        self.hidden = hidden_positions(positions, tiles, window)
        """bool [cut tiles, num_rows * group, KEY_TILE]"""
        num_items = last_tile + 1 - first_tile
        self.item_query = torch.zeros(num_items, dtype=torch.int64)
        self.rank_sizes = [1] * num_items


class Chunk:
    """One sequence with several rows: a prefill chunk."""

    def __init__(self, pool: PoolRows, span: SequenceSpan, first_row: int, group: int, window: int | None):
        self.pool = pool
        self.keys = TiledKeys(pool, span, window)
        size = max(1, MAX_QUERY_ROWS // group)
        self.tiles = [
            QueryTile(
                self.keys, first_row + done, span.start_position + done, min(size, span.num_rows - done), group, window
            )
            for done in range(0, span.num_rows, size)
        ]

    def attend(self, products: TileProducts, layer: int, queries: Tensor, outputs: Tensor) -> None:
        """Fill the rows of `outputs` [T, num_heads, head_dim] that belong to this sequence."""
        runs = list(pieces(self.keys.num_tiles, self.pool))
        whole = self.pool.gather(layer, self.keys.rows) if len(runs) == 1 else None
        for tile in self.tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_rows)
            outputs[rows] = self._attend_tile(products, layer, queries[rows], tile, whole)

    def _attend_tile(
        self, products: TileProducts, layer: int, queries: Tensor, tile: QueryTile, whole: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = self.pool.num_kv_heads
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        own = products.pad_rows(grouped)
        hidden = torch.nn.functional.pad(tile.hidden, (0, 0, 0, own.shape[1] - grouped.shape[1])).unsqueeze(1)
        parts = []
        for run in [slice(0, tile.items.stop - tile.items.start)] if whole else pieces(len(tile.item_query), self.pool):
            items = slice(tile.items.start + run.start, tile.items.start + run.stop)
            keys, values = (
                (part[items] for part in whole) if whole else self.pool.gather(layer, self.keys.rows[:, :, items])
            )
            cut = max(0, tile.first_hidden - run.start)
            run_hidden = hidden[max(0, run.start - tile.first_hidden) : max(0, run.stop - tile.first_hidden)]
            item_queries = own.expand(run.stop - run.start, *own.shape)
            parts.append(products.attend(item_queries, keys, values, run_hidden if len(run_hidden) else None, cut))
        joined = combine(join(parts), tile.item_query, tile.rank_sizes)[0, :, : grouped.shape[1]]
        return joined.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def join(parts: Sequence[TileResult]) -> TileResult:
    return parts[0] if len(parts) == 1 else TileResult(*(torch.cat(field) for field in zip(*parts, strict=True)))
