"""The block pool as rows: what gathering and storing K and V need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PoolRows:
    """A view of the pool whose row is one (block, layer, K or V, KV head): block_size x head_dim numbers."""

    def __init__(self, kv: Tensor):
        """kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; a block is contiguous, and blocks lie
        a whole number of rows apart."""
        num_blocks, num_layers, _, self.num_kv_heads, self.block_size, self.head_dim = kv.shape
        row_size = self.block_size * self.head_dim
        rows_in_block = num_layers * 2 * self.num_kv_heads
        assert kv[0].is_contiguous(), "a block must be contiguous"
        assert kv.stride(0) % row_size == 0, f"blocks must lie a multiple of {row_size} numbers apart"
        self.rows_per_block = kv.stride(0) // row_size
        num_rows = (num_blocks - 1) * self.rows_per_block + rows_in_block
        self.rows = torch.as_strided(kv, (num_rows, row_size), (row_size, 1), kv.storage_offset())
        self.tokens = torch.as_strided(
            kv, (num_rows * self.block_size, self.head_dim), (self.head_dim, 1), kv.storage_offset()
        )
        self._heads = torch.arange(self.num_kv_heads)

    def key_rows(self, block_ids: Sequence[int]) -> Tensor:
        """int64 [num_kv_heads, num_blocks]: rows of K in layer 0."""
        return self._heads.unsqueeze(1) + torch.tensor(block_ids, dtype=torch.int64) * self.rows_per_block

    def key_tokens(self, slots: Tensor) -> Tensor:
        """int64 [n * num_kv_heads]: where K of each (slot, head) lies in `tokens`, layer 0. Slots are not negative."""
        rows = (slots // self.block_size * self.rows_per_block).unsqueeze(1) + self._heads
        return (rows * self.block_size + (slots % self.block_size).unsqueeze(1)).flatten()

    def layer_offset(self, layer: int, part: int) -> int:
        """Rows from K of layer 0 to K (part 0) or V (part 1) of a layer."""
        return (layer * 2 + part) * self.num_kv_heads

    def store(self, layer: int, part: int, key_tokens: Tensor, numbers: Tensor) -> None:
        """numbers: [n, num_kv_heads, head_dim]."""
        where = key_tokens + self.layer_offset(layer, part) * self.block_size
        self.tokens.index_copy_(0, where, numbers.reshape(-1, self.head_dim))

    def gather(self, layer: int, part: int, key_rows: Tensor) -> Tensor:
        """key_rows: int64 [items, num_kv_heads, blocks] -> [items, num_kv_heads, blocks * block_size, head_dim]."""
        items, num_kv_heads, num_blocks = key_rows.shape
        gathered = self.rows.index_select(0, (key_rows + self.layer_offset(layer, part)).flatten())
        return gathered.view(items, num_kv_heads, num_blocks * self.block_size, self.head_dim)
