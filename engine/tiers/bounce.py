"""Page-aligned buffers that are allocated once and reused: what the disk reads into, and what waits to be written."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Buffer:
    """One reusable piece of memory. Pages become resident when first written."""

    memory: memoryview
    """uint8, its whole length, page aligned."""
    is_quarantined: bool = field(default=False)
    """A read that nobody waits for any more may still write into it."""


class BufferPool:
    """At most `num_buffers` in use, not counting quarantined ones. Not thread-safe: its owner has a lock."""

    def __init__(self, buffer_bytes: int, num_buffers: int) -> None:
        assert num_buffers >= 1
        self.buffer_bytes = buffer_bytes
        self.num_buffers = num_buffers
        self.num_used = 0
        self._free: list[Buffer] = []

    @property
    def num_free(self) -> int:
        return self.num_buffers - self.num_used

    def take(self) -> Buffer | None:
        if self.num_used == self.num_buffers:
            return None
        self.num_used += 1
        return self._free.pop() if self._free else _new_buffer(self.buffer_bytes)

    def give_back(self, buffer: Buffer) -> None:
        if buffer.is_quarantined:  # its place was filled by another one meanwhile
            return
        self.num_used -= 1
        self._free.append(buffer)

    def quarantine(self, buffer: Buffer) -> None:
        """It is somebody else's until `give_back`; another buffer may take its place."""
        assert not buffer.is_quarantined
        buffer.is_quarantined = True
        self.num_used -= 1


def _new_buffer(num_bytes: int) -> Buffer:
    """Private memory: a first touch of shared memory, which is Python's default, takes half as long again."""
    return Buffer(memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
