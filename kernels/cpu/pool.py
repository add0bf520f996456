"""The block pool as rows: what gathering and storing K and V need."""

from __future__ import annotations

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
        """Within a block lies layer after layer, K before V, head after head, position after position; scales lie
        alike in a place of their own. Blocks lie a whole number of either's rows apart."""
        self.num_kv_heads, self.block_size, self.head_dim = kv.keys.shape[2:]
        self.values, value_rows_per_block = _rows(kv.keys, kv.values, self.block_size * self.head_dim)
        self.scales, rows_per_block = None, [value_rows_per_block]
        if kv.key_scales is not None and kv.value_scales is not None:
            self.scales, scale_rows_per_block = _rows(kv.key_scales, kv.value_scales, self.block_size)
            rows_per_block.append(scale_rows_per_block)
        self._rows_per_block = torch.tensor(rows_per_block).view(-1, 1, 1)
        self._gathered, self._quanta = _Buffer(torch.float32), _Buffer(torch.int8)
        self._heads = torch.arange(self.num_kv_heads)

    def rows_of(self, block_ids: Tensor) -> Tensor:
        """int64 [n] -> int64 [planes, 2, n, num_kv_heads]: rows of K, then V, of each block in layer 0."""
        keys = block_ids.unsqueeze(1) * self._rows_per_block + self._heads
        return torch.stack((keys, keys + self.num_kv_heads), dim=1)

    def tokens_of(self, slots: Tensor) -> Tensor:
        """int64 [n], not negative -> int64 [planes, 2, n, num_kv_heads]: where each slot lies in layer 0, counted in
        positions of rows."""
        return self.rows_of(slots // self.block_size) * self.block_size + (slots % self.block_size).unsqueeze(1)

    def store(self, layer: int, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values: [n, num_kv_heads, head_dim], to the places `tokens` (of `tokens_of`)."""
        where = (tokens + layer * 2 * self.num_kv_heads * self.block_size).flatten(1)
        numbers = torch.stack((keys, values)).view(-1, self.head_dim)
        if self.scales is not None:
            numbers, scales = quantise_rows(numbers)
            self.scales.view(-1).index_copy_(0, where[1], scales)
        self.values.view(-1, self.head_dim).index_copy_(0, where[0], numbers)

    def gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [planes, 2, items, num_kv_heads, blocks] -> K and V, float32 [items, num_kv_heads, blocks * block_size,
        head_dim], in memory that the next call overwrites."""
        _, parts, items, num_kv_heads, num_blocks = rows.shape
        where = (rows + layer * 2 * self.num_kv_heads).flatten(1)
        shape = (where.shape[1], self.values.shape[1])
        numbers = self._gathered.of(shape)
        if self.scales is None:
            torch.index_select(self.values, 0, where[0], out=numbers)
        else:
            quanta = torch.index_select(self.values, 0, where[0], out=self._quanta.of(shape))
            scales = self.scales.index_select(0, where[1])
            numbers.copy_(quanta).view(-1, self.head_dim).mul_(scales.view(-1, 1))
        keys, values = numbers.view(parts, items, num_kv_heads, num_blocks * self.block_size, self.head_dim)
        return keys, values


class _Buffer:
    """Memory that is taken once and grows: large tensors made anew for each layer cost their page faults each time."""

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def of(self, shape: tuple[int, int]) -> Tensor:
        size = shape[0] * shape[1]
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


def _rows(keys: Tensor, values: Tensor, row_size: int) -> tuple[Tensor, int]:
    """Views [num_blocks, num_layers, num_kv_heads, ...] -> the pool as a matrix of rows that starts where `keys` does,
    and its rows per block."""
    num_blocks, num_layers, num_kv_heads = keys.shape[:3]
    per_layer = num_kv_heads * row_size
    assert num_layers == 1 or keys.stride(1) == values.stride(1) == 2 * per_layer, "not the order of layers"
    assert num_kv_heads == 1 or keys.stride(2) == values.stride(2) == row_size, "not the order of heads"
    assert values.storage_offset() - keys.storage_offset() == per_layer, "V must follow K"
    assert keys[0, 0].is_contiguous(), "a row must be contiguous"
    assert keys.stride(0) % row_size == 0, f"blocks must lie a multiple of {row_size} numbers apart"
    rows_per_block = keys.stride(0) // row_size
    num_rows = (num_blocks - 1) * rows_per_block + num_layers * 2 * num_kv_heads
    return torch.as_strided(keys, (num_rows, row_size), (row_size, 1), keys.storage_offset()), rows_per_block
