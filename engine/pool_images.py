"""The device pool as bytes: one block is one contiguous image, so moving it between tiers is one copy."""

from __future__ import annotations

import numpy
from torch import Tensor


class PoolImages:
    """`pool`: uint8 [num_blocks, block_bytes] in the CPU's memory. Implements `BlockImages`."""

    def __init__(self, pool: Tensor) -> None:
        self._rows = pool.numpy()
        self.image_bytes = self._rows.shape[1]

    def read(self, block_id: int) -> memoryview:
        """No copy: valid until the block is written."""
        return memoryview(self._rows[block_id])

    def write(self, block_id: int, image: memoryview) -> None:
        """`image`: image_bytes bytes."""
        self._rows[block_id] = numpy.frombuffer(image, numpy.uint8, self.image_bytes)
