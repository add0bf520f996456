"""The copies of one tier: what is live, what may be evicted, what changed. All of it under the tier's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .score import HitClock, LeafHeap, add_hit
from .tier import BlockRecord, CopyState, TierCopy


class CopySet:
    """Live copies in the order they came, so that parents stand before children. Keeps the counts in the copies."""

    def __init__(self, image_bytes: int, hit_clock: HitClock) -> None:
        self.leaves = LeafHeap(image_bytes)
        self.num_stored = 0
        self._live: dict[TierCopy, None] = {}
        self._hit_clock = hit_clock
        self._changes: list[TierCopy] = []

    def __len__(self) -> int:
        return len(self._live)

    def stored(self) -> list[TierCopy]:
        return [copy for copy in self._live if copy.state is CopyState.STORED]

    def live(self) -> list[TierCopy]:
        return list(self._live)

    def add(self, record: BlockRecord, parent: TierCopy | None, num_pins: int = 0) -> TierCopy:
        """A QUEUED copy that was hit once, now."""
        copy = TierCopy(record, parent, -1, CopyState.QUEUED, num_pins=num_pins)
        add_hit(copy, self._hit_clock.now_s())
        self._live[copy] = None
        if parent is not None:
            parent.num_children += 1
        return copy

    def adopt(self, copies: Iterable[TierCopy]) -> None:
        """STORED copies found when the tier was opened, parents before children, their children counted."""
        self._live.update(dict.fromkeys(copies))
        self.num_stored = len(self._live)
        self._hit_clock.advance(max((copy.hit_at_s for copy in self._live), default=0.0))
        for copy in self._live:
            if not copy.num_children:
                self.leaves.push(copy)

    def set_stored(self, copies: Sequence[TierCopy]) -> None:
        for copy in copies:
            assert copy.state is CopyState.QUEUED
            copy.state = CopyState.STORED
            self.leaves.push(copy)
        self.num_stored += len(copies)
        self._changes.extend(copies)

    def drop(self, copies: Iterable[TierCopy]) -> list[TierCopy]:
        """These and all below them go: GONE, children before parents. Those that are GONE already are left out."""
        doomed = dict.fromkeys(copy for copy in copies if copy.state is not CopyState.GONE)
        num_inside: dict[TierCopy, int] = {}
        for copy in doomed:
            if copy.parent is not None:
                num_inside[copy.parent] = num_inside.get(copy.parent, 0) + 1
        if any(copy.num_children != num_inside.get(copy, 0) for copy in doomed):
            for copy in self._live:
                if copy.parent in doomed:
                    doomed[copy] = None
        dropped = sorted(doomed, key=lambda copy: -copy.record.position)
        for copy in dropped:
            self.num_stored -= copy.state is CopyState.STORED
            copy.state = CopyState.GONE
            del self._live[copy]
            if copy.parent is not None:
                copy.parent.num_children -= 1
                self.leaves.push(copy.parent)
        self.leaves.drop_gone(len(self._live))
        return dropped

    def tell(self, changed: Iterable[TierCopy]) -> None:
        """The tier itself dropped them."""
        self._changes.extend(changed)

    def take_changes(self) -> list[TierCopy]:
        changes, self._changes = self._changes, []
        return changes

    def touch(self, copies: Iterable[TierCopy]) -> None:
        now_s = self._hit_clock.now_s()
        for copy in copies:
            add_hit(copy, now_s)

    def pin(self, copies: Iterable[TierCopy], is_pinned: bool) -> None:
        for copy in copies:
            copy.num_pins = copy.num_pins + 1 if is_pinned else max(0, copy.num_pins - 1)
            self.leaves.push(copy)

    def begin_read(self, copies: Iterable[TierCopy]) -> list[TierCopy]:
        """The leading ones that can be read; they cannot be evicted until `end_read`."""
        readable: list[TierCopy] = []
        for copy in copies:
            if copy.state is not CopyState.STORED:
                break
            copy.num_readers += 1
            readable.append(copy)
        return readable

    def end_read(self, copies: Iterable[TierCopy]) -> None:
        for copy in copies:
            copy.num_readers -= 1
            self.leaves.push(copy)
