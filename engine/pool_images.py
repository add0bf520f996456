"""The device pool as bytes: one block is one contiguous image, so moving it between tiers is one copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy
from torch import Tensor


class PoolImages:
    """`pool`: uint8 [num_blocks, block_bytes] in the CPU's memory. Implements `BlockImages`."""

    def __init__(self, pool: Tensor, on_write: Callable[[int], None] = lambda block_id: None) -> None:
        self._rows = pool.numpy()
        self._on_write = on_write
        self.image_bytes = self._rows.shape[1]

    def read(self, block_id: int) -> memoryview:
        """No copy: valid until the block is written."""
        return memoryview(self._rows[block_id])

    def write(self, block_id: int, image: memoryview) -> None:
        """`image`: image_bytes bytes."""
        self._on_write(block_id)
        self._rows[block_id] = numpy.frombuffer(image, numpy.uint8, self.image_bytes)
