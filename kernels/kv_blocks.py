"""The block pool as kernels see it: K and V, and their scales where they are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

LARGEST_QUANTUM = 127
"""int8 K and V are symmetric: -128 is not used."""
LARGEST_FP8 = 448.0
"""Of float8_e4m3fn: the largest magnitude of a row becomes this."""

KeyOrder: TypeAlias = Literal["position", "dimension"]
"""What comes first in the keys of one head in a block: numbers of a position lie together, or those of a dimension."""


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Strided views of one pool. A stored row is the K or V of one (position, KV head): head_dim numbers.

    Where the numbers lie is the layout's matter (`engine.kv_layout`): these shapes are the same for all.
    """

    keys: Tensor
    """[num_blocks, num_layers, num_kv_heads, block_size, head_dim]: float32, float16, bfloat16, int8, or uint8:
    bytes of float8_e4m3fn."""
    values: Tensor
    """Like `keys`."""
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_layers, num_kv_heads, block_size], one a row of 8-bit keys: number = quantum * scale.
    None where the numbers are floats."""
    value_scales: Tensor | None = None
    """Like `key_scales`."""

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]
