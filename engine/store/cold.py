"""Blocks of slabs that no model uses now: evicted coldest leaf first, forgotten by name."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable

from ..tiers.tier import TierCopy
from .slab import Slab


class ColdSlab:
    """One of them, open for a while. Its owner holds the lock of the store's space."""

    def __init__(self, slab: Slab, *, is_stale: bool = False):
        """`is_stale`: another slab of the same weights is in use."""
        self.slab = slab
        self.is_stale = is_stale
        self.copies: dict[bytes, TierCopy] = {copy.record.block_hash: copy for copy in slab.stored()}

    def leaves(self) -> list[TierCopy]:
        return [copy for copy in self.copies.values() if not copy.num_children]

    def at(self, slots: Collection[int]) -> list[TierCopy]:
        return [copy for copy in self.copies.values() if copy.slot in slots]

    def named(self, block_hashes: Iterable[bytes]) -> list[TierCopy]:
        return [self.copies[name] for name in block_hashes if name in self.copies]

    def with_parents(self, copies: Iterable[TierCopy]) -> set[bytes]:
        """Names of these and of all above them."""
        names: set[bytes] = set()
        for copy in copies:
            above: TierCopy | None = copy
            while above is not None and above.record.block_hash not in names:
                names.add(above.record.block_hash)
                above = above.parent
        return names

    def with_children(self, copies: Iterable[TierCopy]) -> set[bytes]:
        """Names of these and of all below them."""
        names = {copy.record.block_hash for copy in copies}
        for copy in self.copies.values():  # Parents come before their children.
            if copy.parent is not None and copy.parent.record.block_hash in names:
                names.add(copy.record.block_hash)
        return names

    def erase(self, names: Collection[bytes], *, is_forgotten: bool) -> None:
        """With all that is below them, or this would leave children alone. Raises OSError, BrokenIndexError."""
        gone = [self.copies.pop(name) for name in names]
        for copy in gone:
            if copy.parent is not None:
                copy.parent.num_children -= 1
        self.slab.erase([copy.slot for copy in gone], is_punched=True, is_forgotten=is_forgotten)


class ColdLeaves:
    """The leaves of some slabs, coldest first; those of stale ones count as never hit."""

    def __init__(
        self,
        slabs: Iterable[ColdSlab],
        pinned_in: Callable[[bytes], Collection[bytes]],
        now_s: float,
    ):
        self._slabs = list(slabs)
        self._pinned_in = pinned_in
        # A clock that was set back must not keep what was hit in the future.
        self._now_s = now_s
        self._heap: list[tuple[float, int, int, TierCopy]] = []
        for number, cold in enumerate(self._slabs):
            for copy in cold.leaves():
                self._push(number, copy)

    def oldest(self, before_s: float) -> float | None:
        """When the coldest leaf was hit, pinned ones left out; None: not before `before_s`."""
        if self._heap and self._heap[0][0] < before_s:  # else nobody need be asked what is pinned
            self._skip_pinned({})
        return self._heap[0][0] if self._heap and self._heap[0][0] < before_s else None

    def evict(self, num_bytes: int) -> list[ColdSlab]:
        """Erase and punch leaves of at least so many bytes, or all; the slabs they were in. Raises OSError."""
        victims: dict[int, set[bytes]] = {}
        pinned: dict[int, Collection[bytes]] = {}
        num_left: dict[TierCopy, int] = {}
        """Children of parents of victims: `num_children` goes down only when these are erased."""
        freed_bytes = 0
        while freed_bytes < num_bytes:
            self._skip_pinned(pinned)
            if not self._heap:
                break
            _, number, _, copy = heapq.heappop(self._heap)
            victims.setdefault(number, set()).add(copy.record.block_hash)
            freed_bytes += self._slabs[number].slab.slot_bytes
            if copy.parent is not None:
                num_left[copy.parent] = num_left.get(copy.parent, copy.parent.num_children) - 1
                if not num_left[copy.parent]:
                    self._push(number, copy.parent)
        for number, names in victims.items():
            self._slabs[number].erase(names, is_forgotten=False)
        return [self._slabs[number] for number in victims]

    def _push(self, number: int, copy: TierCopy) -> None:
        hit_at_s = 0.0 if self._slabs[number].is_stale else min(copy.hit_at_s, self._now_s)
        heapq.heappush(self._heap, (hit_at_s, number, copy.slot, copy))

    def _skip_pinned(self, pinned: dict[int, Collection[bytes]]) -> None:
        while self._heap:
            _, number, _, copy = self._heap[0]
            if number not in pinned:
                pinned[number] = self._pinned_in(self._slabs[number].slab.fingerprint)
            if copy.record.block_hash not in pinned[number]:
                return
            heapq.heappop(self._heap)

    def close(self) -> None:
        for cold in self._slabs:
            cold.slab.close()
