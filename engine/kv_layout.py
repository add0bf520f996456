"""How a block's image is laid out: one contiguous piece of bytes over all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import BLOCK_SIZE
from .models.config import ModelConfig

IMAGE_ALIGNMENT = 4096
"""Bytes. Direct disk I/O moves whole units of this."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """K and V of one block: [num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim] of `dtype`, K at 0 and V at 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, kv_dtype: torch.dtype) -> KVLayout:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype)

    @property
    def used_bytes(self) -> int:
        """Of an image, without the padding at its end."""
        return self.num_layers * 2 * self.num_kv_heads * self._row_bytes

    @property
    def block_bytes(self) -> int:
        """A multiple of IMAGE_ALIGNMENT, and of one head's K, so that the pool is a matrix of such rows."""
        unit = math.lcm(IMAGE_ALIGNMENT, self._row_bytes)
        return -(-self.used_bytes // unit) * unit

    def new_pool(self, num_blocks: int, device: torch.device) -> Tensor:
        """uint8 [num_blocks, block_bytes]. Memory is taken from the system as blocks are first written."""
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def views(self, pool: Tensor) -> Tensor:
        """uint8 [num_blocks, block_bytes] -> [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim]."""
        shape = (self.num_layers, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        return pool.view(self.dtype)[:, : math.prod(shape)].unflatten(1, shape)

    def facts(self) -> dict[str, Any]:
        """What of it a stored number's meaning depends on."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "scales": None,
            "layout": ["layer", "k_or_v", "kv_head", "position", "dimension"],
            "block_bytes": self.block_bytes,
        }

    @property
    def _row_bytes(self) -> int:
        return BLOCK_SIZE * self.head_dim * self.dtype.itemsize
