"""Block images that wait to be written. Every method but `fill` expects the tier's lock held."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .bounce import Buffer, BufferPool
from .tier import CopyState, Owners, TierCopy


@dataclass(frozen=True, slots=True, eq=False)
class QueuedBlock:
    copy: TierCopy
    owners: Owners
    buffer: Buffer
    queued_at: float
    """Monotonic seconds."""


class WriteQueue:
    """First in, first out; bounded by its buffers, which hold one image each and are reused."""

    def __init__(self, image_bytes: int, queue_bytes: int) -> None:
        self._buffers = BufferPool(image_bytes, max(2, queue_bytes // image_bytes))
        self._blocks: deque[QueuedBlock] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return len(self._blocks) * self._buffers.buffer_bytes

    @property
    def oldest_at(self) -> float | None:
        return self._blocks[0].queued_at if self._blocks else None

    def take_buffer(self) -> Buffer | None:
        """None: the queue is full."""
        return self._buffers.take()

    @staticmethod
    def fill(buffer: Buffer, image: memoryview) -> None:
        buffer.memory[:] = image

    def give_back(self, buffer: Buffer) -> None:
        self._buffers.give_back(buffer)

    def put(self, block: QueuedBlock) -> None:
        self._blocks.append(block)

    def take(self) -> list[QueuedBlock]:
        """All that is still wanted; their buffers are the caller's to give back."""
        self.drop_gone()
        blocks = list(self._blocks)
        self._blocks.clear()
        return blocks

    def drop_gone(self) -> None:
        """Cancelled ones leave at once, so that their memory can be used and nothing of them is written."""
        if any(block.copy.state is CopyState.GONE for block in self._blocks):
            kept = [block for block in self._blocks if block.copy.state is not CopyState.GONE]
            for block in self._blocks:
                if block.copy.state is CopyState.GONE:
                    self.give_back(block.buffer)
            self._blocks = deque(kept)
