"""The block pool as kernels see it: K and V, and their scales where they are quantised."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LARGEST_QUANTUM = 127
"""int8 K and V are symmetric: -128 is not used."""


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Strided views of one pool. A stored row is the K or V of one (position, KV head): head_dim numbers."""

    values: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], K at 0 and V at 1: float32, or int8."""
    scales: Tensor | None = None
    """float32 [num_blocks, num_layers, 2, num_kv_heads, block_size], one a row of int8 values: number = value * scale.
    None for float32."""

    @property
    def block_size(self) -> int:
        return self.values.shape[4]
