"""The block pool as rows: what gathering and storing K and V need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kv_blocks import KVBlocks
from ..reference import quantise_rows


class PoolRows:
    """A view of the pool whose row is one (block, layer, K or V, KV head): block_size x head_dim numbers.

    Scales form a second matrix of rows, block_size numbers each, in the same order but at other distances from block
    to block. So an index of rows has a plane for values and, in a quantised pool, one for scales.
    """

    def __init__(self, kv: KVBlocks):
        """A block's values are contiguous, its scales too; blocks lie a whole number of either's rows apart."""
        self.num_kv_heads, self.block_size, self.head_dim = kv.values.shape[3:]
        self.values, value_rows_per_block = _rows(kv.values, self.block_size * self.head_dim)
        self.scales, rows_per_block = None, [value_rows_per_block]
        if kv.scales is not None:
            self.scales, scale_rows_per_block = _rows(kv.scales, self.block_size)
            rows_per_block.append(scale_rows_per_block)
        self._rows_per_block = torch.tensor(rows_per_block).view(-1, 1, 1)
        self._heads = torch.arange(self.num_kv_heads)

    def key_rows(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [planes, num_kv_heads, num_blocks]: rows of K in layer 0."""
        return self._heads.unsqueeze(1) + torch.tensor(block_ids, dtype=torch.int64) * self._rows_per_block

    def tokens(self, slots: Tensor) -> Tensor:
        """int64 [planes, 2 * n * num_kv_heads]: where K, then V, of each (slot, head) lie in layer 0, counted in stored
        rows of one position. Slots are int64 [n], not negative."""
        keys = (slots // self.block_size).unsqueeze(1) * self._rows_per_block + self._heads
        rows = torch.stack((keys, keys + self.num_kv_heads), dim=1)
        return (rows * self.block_size + (slots % self.block_size).unsqueeze(1)).flatten(1)

    def store(self, layer: int, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values: [n, num_kv_heads, head_dim], to the places that `tokens` gave for n slots."""
        where = tokens + layer * 2 * self.num_kv_heads * self.block_size
        numbers = torch.stack((keys, values)).view(-1, self.head_dim)
        if self.scales is not None:
            numbers, scales = quantise_rows(numbers)
            self.scales.view(-1).index_copy_(0, where[1], scales)
        self.values.view(-1, self.head_dim).index_copy_(0, where[0], numbers)

    def gather(self, layer: int, part: int, key_rows: Tensor) -> Tensor:
        """K (part 0) or V (part 1): int64 [planes, items, num_kv_heads, blocks] -> float32
        [items, num_kv_heads, blocks * block_size, head_dim]."""
        items, num_kv_heads, num_blocks = key_rows.shape[1:]
        rows = (key_rows + (layer * 2 + part) * self.num_kv_heads).flatten(1)
        gathered = self.values.index_select(0, rows[0])
        if self.scales is not None:
            scales = self.scales.index_select(0, rows[1])
            gathered = gathered.view(-1, self.head_dim).float().mul_(scales.view(-1, 1))
        return gathered.view(items, num_kv_heads, num_blocks * self.block_size, self.head_dim)


def _rows(view: Tensor, row_size: int) -> tuple[Tensor, int]:
    """[num_blocks, ...] -> the pool as a matrix of rows that starts where `view` does, and its rows per block."""
    assert view[0].is_contiguous(), "a block must be contiguous"
    assert view.stride(0) % row_size == 0, f"blocks must lie a multiple of {row_size} numbers apart"
    rows_per_block = view.stride(0) // row_size
    num_rows = (len(view) - 1) * rows_per_block + view[0].numel() // row_size
    return torch.as_strided(view, (num_rows, row_size), (row_size, 1), view.storage_offset()), rows_per_block
