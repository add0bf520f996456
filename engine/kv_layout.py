"""How a block's image is laid out: one contiguous piece of bytes over all layers, scales included."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chatkv.kernels.kv_blocks import LARGEST_FP8, LARGEST_QUANTUM, KeyOrder, KVBlocks

from .config import BLOCK_SIZE
from .models.config import ModelConfig

IMAGE_ALIGNMENT = 4096
"""Bytes. Direct disk I/O moves whole units of this."""
LAYOUT = ("layer", "k_or_v", "kv_head", "position", "dimension")
"""Order of the numbers in an image, slowest first. Scales follow all values, in the same order without the last."""
LAYOUT_BY_DIMENSION = {"keys": (*LAYOUT[:3], "dimension", "position"), "values": LAYOUT}
"""The same where K is turned: a query meets all positions of a block at once, in the lanes of a vector."""
TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.uint8,
}
"""What the pool's views hold. "fp8": bytes of float8_e4m3fn, which not every device has as a type."""
SCALE_DTYPE = torch.float32
"""float16 would save 2 % of an int8 image, and is as accurate for the default model (measured); but rows of numbers
below 0.008 would lose precision, and those above 8e6 would be infinite. In float32 every row keeps its 8 bits."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """K and V of one block: [num_layers, 2, num_kv_heads, BLOCK_SIZE, head_dim], K at 0 and V at 1; for int8 and fp8, a
    scale for each (layer, K or V, KV head, position) behind them."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "fp32"
    """A key of TORCH_DTYPES."""
    keys_by: KeyOrder = "position"

    @classmethod
    def of(cls, config: ModelConfig, kv_dtype: str, keys_by: KeyOrder) -> KVLayout:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype, keys_by)

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype in ("int8", "fp8")

    @property
    def used_bytes(self) -> int:
        """Of an image, without the padding at its end."""
        return self._values_bytes + self._scales_bytes

    @property
    def block_bytes(self) -> int:
        """A multiple of IMAGE_ALIGNMENT, and of one head's K, so that the pool is a matrix of such rows."""
        unit = math.lcm(IMAGE_ALIGNMENT, self._row_bytes)
        return -(-self.used_bytes // unit) * unit

    def new_pool(self, num_blocks: int, device: torch.device) -> Tensor:
        """uint8 [num_blocks, block_bytes]. Memory is taken from the system as blocks are first written."""
        if device.type == "cpu":
            return _system_memory(num_blocks * self.block_bytes).view(num_blocks, self.block_bytes)
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def views(self, pool: Tensor) -> KVBlocks:
        """uint8 [num_blocks, block_bytes] -> K, V and scales of every block, sharing the pool's memory."""
        heads = (*self._outer_shape[:3], BLOCK_SIZE * self.head_dim)
        keys, values = _view(pool, 0, TORCH_DTYPES[self.kv_dtype], heads).unbind(2)
        values = values.unflatten(-1, (BLOCK_SIZE, self.head_dim))
        if self.keys_by == "position":
            keys = keys.unflatten(-1, (BLOCK_SIZE, self.head_dim))
        else:
            keys = keys.unflatten(-1, (self.head_dim, BLOCK_SIZE)).transpose(-1, -2)
        if not self.is_quantised:
            return KVBlocks(keys, values)
        return KVBlocks(keys, values, *_view(pool, self._values_bytes, SCALE_DTYPE, self._outer_shape).unbind(2))

    def facts(self) -> dict[str, Any]:
        """What of it a stored number's meaning depends on."""
        by_dimension = {part: list(order) for part, order in LAYOUT_BY_DIMENSION.items()}
        return {
            "dtype": "float8_e4m3fn" if self.kv_dtype == "fp8" else _name(TORCH_DTYPES[self.kv_dtype]),
            "scales": self._scale_facts() if self.is_quantised else None,
            "layout": list(LAYOUT) if self.keys_by == "position" else by_dimension,
            "block_bytes": self.block_bytes,
        }

    def _scale_facts(self) -> dict[str, Any]:
        """How a row's scale follows from its numbers."""
        largest: dict[str, dict[str, float]] = {
            "int8": {"largest_quantum": LARGEST_QUANTUM},
            "fp8": {"largest_number": LARGEST_FP8},
        }
        return {
            "dtype": _name(SCALE_DTYPE),
            "one_per": list(LAYOUT[:-1]),
            "scheme": "symmetric",
            **largest[self.kv_dtype],
        }

    @property
    def _outer_shape(self) -> tuple[int, ...]:
        return self.num_layers, 2, self.num_kv_heads, BLOCK_SIZE

    @property
    def _row_bytes(self) -> int:
        return BLOCK_SIZE * self.head_dim * TORCH_DTYPES[self.kv_dtype].itemsize

    @property
    def _values_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self._row_bytes

    @property
    def _scales_bytes(self) -> int:
        return math.prod(self._outer_shape) * SCALE_DTYPE.itemsize if self.is_quantised else 0


def _view(pool: Tensor, offset_bytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    start = offset_bytes // dtype.itemsize
    return pool.view(dtype)[:, start : start + math.prod(shape)].unflatten(1, shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _system_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], page-aligned. Private memory: a first touch of shared memory, which is Python's default, takes
    half as long again. Large pages are not asked for: they make attention 4 % faster, and the system may take
    hundreds of milliseconds to put one together."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
