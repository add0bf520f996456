"""Which places of a slab are free, and which of those the file system has not got back."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Slots:
    """Not thread-safe. Places are numbered from 0. Taken first: the lowest free one whose range is still allocated, as
    it costs no bytes; then the lowest other one, so that the tail gets free."""

    def __init__(self, num_slots: int, used: Collection[int]):
        self.num_slots = num_slots
        self._free = set(range(num_slots)).difference(used)
        self._holes = sorted(self._free)
        self._reusable: list[int] = []
        """Heaps, like `_holes`; either may name places that are no longer free, or no longer of its kind."""
        self._residue = set(used)
        """Places that may hold bytes."""
        self._whole: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> list[int]:
        return sorted(self._free)

    @property
    def residue(self) -> list[int]:
        """Free places that may still hold bytes of what was there."""
        return sorted(self._residue & self._free)

    def take(self) -> int:
        for heap in (self._reusable, self._holes):
            while heap:
                slot = heapq.heappop(heap)
                if slot in self._free:
                    self._free.remove(slot)
                    return slot
        self.num_slots += 1
        return self.num_slots - 1

    def give_back(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        if slot < self.num_slots:
            self._free.add(slot)
            heapq.heappush(self._reusable if slot in self._whole else self._holes, slot)

    def is_free(self, slot: int) -> bool:
        return slot in self._free or slot >= self.num_slots

    def is_whole(self, slot: int) -> bool:
        """Its whole range is allocated."""
        return slot in self._whole

    def is_written(self, slot: int) -> bool:
        """It may hold bytes."""
        return slot in self._residue

    def note_allocated(self, slots: range) -> None:
        """By the file system, as it was found at the opening; free ones among them were noted before."""
        self._whole.update(slots)

    def note_written(self, slot: int, *, is_whole: bool) -> None:
        """It holds bytes now; `is_whole`: in all of its range."""
        self._residue.add(slot)
        if is_whole and slot not in self._whole:
            self._whole.add(slot)
            if slot in self._free:
                heapq.heappush(self._reusable, slot)

    def note_punched(self, slot: int) -> None:
        self._residue.discard(slot)
        self._whole.discard(slot)
        if slot in self._free:
            heapq.heappush(self._holes, slot)

    def cut_tail(self) -> int:
        """Forget the free places at the end; how many are left."""
        while self.num_slots and self.num_slots - 1 in self._free:
            self.num_slots -= 1
            self._free.remove(self.num_slots)
            self.note_punched(self.num_slots)
        return self.num_slots
