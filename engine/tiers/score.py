"""What a copy is worth keeping: decayed hits x the time to compute it again / bytes.

Hits decay with one half-life for all, so the order of two copies never changes by waiting: log2 of the score at time t
is log2(hits) + hit_at / half-life + log2(cost) - t / half-life, and the last term is the same for everybody. What is
left is the `rank`, which needs no clock and only ever grows with a hit. So a heap of ranks stays right: an entry whose
copy was hit since is found with too low a rank, and is put back with the present one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import log2

from .tier import CopyState, TierCopy

HALF_LIFE_S = 3 * 24 * 3600.0
NUM_GONE_KEPT = 1024
POSITION_DOUBLING_COST = 256
"""Attention over this many blocks costs about as much as the rest of a block's computation."""


class HitClock:
    """Wall clock seconds that never run backwards: a clock set back must not make today's hits older than last week's.

    `start_s`: the latest time that any known hit bears.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        start_s: float = 0.0,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._seen_s = max(start_s, wall())
        self._seen_at = monotonic()

    def now_s(self) -> float:
        at = self._monotonic()
        self._seen_s = max(self._wall(), self._seen_s + at - self._seen_at)
        self._seen_at = at
        return self._seen_s

    def advance(self, start_s: float) -> None:
        self._seen_s = max(self._seen_s, start_s)


def decayed_hits(hits: float, hit_at_s: float, now_s: float) -> float:
    """Count of hits as of `now_s`; a time before `hit_at_s` decays nothing."""
    return hits * 0.5 ** (max(0.0, now_s - hit_at_s) / HALF_LIFE_S)


def add_hit(copy: TierCopy, now_s: float) -> None:
    copy.hits = decayed_hits(copy.hits, copy.hit_at_s, now_s) + 1.0
    copy.hit_at_s = max(copy.hit_at_s, now_s)


def rank(hits: float, hit_at_s: float, position: int, num_bytes: int) -> float:
    """Order of the scores at any one time: the lowest goes first. A block never hit counts as hit very little."""
    cost = 1.0 + position / POSITION_DOUBLING_COST
    return log2(max(hits, 1e-9)) + hit_at_s / HALF_LIFE_S + log2(cost / num_bytes)


class LeafHeap:
    """Copies that may be evicted, lowest rank first; of equal ones, the one that came first.

    Entries are checked when they are popped, so a copy that stopped being a free leaf need not be searched for. Whoever
    makes a copy a free leaf again (child gone, unpinned, read) pushes it.
    """

    def __init__(self, image_bytes: int) -> None:
        self._image_bytes = image_bytes
        self._heap: list[tuple[float, int, TierCopy]] = []
        self._members: set[TierCopy] = set()
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, copy: TierCopy) -> None:
        """No effect unless it may be evicted now."""
        if copy not in self._members and is_free_leaf(copy):
            self._members.add(copy)
            self._insert(copy)

    def peek(self) -> tuple[float, TierCopy] | None:
        """Rank and copy of the next one to go."""
        while self._heap:
            known_rank, _, copy = self._heap[0]
            present_rank = self._rank(copy)
            if is_free_leaf(copy) and present_rank <= known_rank:
                return known_rank, copy
            heappop(self._heap)
            if is_free_leaf(copy):
                self._insert(copy)
            else:
                self._members.discard(copy)
        return None

    def pop(self) -> TierCopy | None:
        found = self.peek()
        if found is None:
            return None
        heappop(self._heap)
        self._members.discard(found[1])
        return found[1]

    def drop_gone(self, num_live: int) -> None:
        """Entries of copies that are GONE must not pile up while nothing has to be evicted."""
        if len(self._heap) > num_live + NUM_GONE_KEPT:
            self._heap = [entry for entry in self._heap if entry[2].state is not CopyState.GONE]
            heapify(self._heap)
            self._members = {copy for _, _, copy in self._heap}

    def _insert(self, copy: TierCopy) -> None:
        self._num_pushed += 1
        heappush(self._heap, (self._rank(copy), self._num_pushed, copy))

    def _rank(self, copy: TierCopy) -> float:
        return rank(copy.hits, copy.hit_at_s, copy.record.position, self._image_bytes)


def is_free_leaf(copy: TierCopy) -> bool:
    return copy.state is CopyState.STORED and not (copy.num_children or copy.num_pins or copy.num_readers)
