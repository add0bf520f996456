"""One load: which of its blocks are read, ready, given out. Every method expects the lock of its pool held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .bounce import Buffer
from .tier import CopyState, TierCopy


class LoadState:
    """Blocks `[0, end)` of a chain come; `end` moves forward to a block that failed, was late or is not wanted.

    0 .. _next_to_give .. num_leading .. _next_to_read .. end
      given            ready       ready or being read
    """

    def __init__(self, copies: Sequence[TierCopy], deadline_at: float) -> None:
        self.copies = copies
        self.deadline_at = deadline_at
        self.end = len(copies)
        self.num_reading = 0
        self.is_settled = False
        """All that will ever come is in memory: the copies need not be held any more."""
        self._next_to_read = 0
        self._next_to_give = 0
        self.num_leading = 0
        self._ready: dict[int, Buffer] = {}
        self._given: dict[int, tuple[memoryview, Buffer]] = {}

    @property
    def wants_reading(self) -> bool:
        return self._next_to_read < self.end

    @property
    def num_buffers(self) -> int:
        return self.num_reading + len(self._ready) + len(self._given)

    @property
    def is_done(self) -> bool:
        return self._next_to_give >= self.end

    @property
    def has_all(self) -> bool:
        """Every block before `end` has been read."""
        return self.num_leading >= self.end

    def num_in_run(self, max_blocks: int, is_neighbour: Callable[[TierCopy, TierCopy], bool]) -> int:
        """How many of the next blocks one read can fetch together. At least 1."""
        first = self._next_to_read
        last = first
        while last + 1 < min(first + max_blocks, self.end) and is_neighbour(self.copies[last], self.copies[last + 1]):
            last += 1
        return last + 1 - first

    def begin_read(self, num_blocks: int) -> range:
        """Indices of the next blocks."""
        self._next_to_read += num_blocks
        self.num_reading += num_blocks
        return range(self._next_to_read - num_blocks, self._next_to_read)

    def finish_read(self, index: int, buffer: Buffer, is_good: bool) -> list[Buffer]:
        """Gives the buffers that are free again. Not to be called for a read that was given up."""
        self.num_reading -= 1
        freed = [] if is_good else self.cut(index)
        if not is_good or index >= self.end:
            return [*freed, buffer]
        self._ready[index] = buffer
        while self.num_leading in self._ready:
            self.num_leading += 1
        return freed

    def cut(self, index: int) -> list[Buffer]:
        """Nothing from `index` on will come. Gives the buffers of what was ready there."""
        self.end = min(self.end, max(index, self._next_to_give))
        self.num_leading = min(self.num_leading, self.end)
        return [self._ready.pop(i) for i in [i for i in self._ready if i >= self.end]]

    def cut_to_leading(self) -> list[Buffer]:
        """What is ready without a gap still comes."""
        return self.cut(self.num_leading)

    def cut_to_given(self) -> list[Buffer]:
        return self.cut(self._next_to_give)

    def give(self) -> tuple[list[memoryview], list[Buffer]]:
        """Images, and buffers that are free again: a copy that was removed meanwhile ends the load."""
        images: list[memoryview] = []
        while self._next_to_give < self.num_leading:
            if self.copies[self._next_to_give].state is CopyState.GONE:
                return images, self.cut_to_given()
            buffer = self._ready.pop(self._next_to_give)
            image = buffer.memory[:]
            self._given[id(image)] = (image, buffer)  # holds the view, so that the id stays its own
            images.append(image)
            self._next_to_give += 1
        return images, []

    def take_back(self, image: memoryview) -> Buffer:
        return self._given.pop(id(image))[1]
