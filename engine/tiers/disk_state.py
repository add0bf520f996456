"""What the threads of a disk tier share. One short lock over all of it; nobody holds it during I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .copy_set import CopySet
from .tier import CopyState, TierCopy
from .write_queue import WriteQueue

NUM_READ_FAILURES = 3
"""An I/O error may pass; a block that cannot be read this many times is dropped."""


@dataclass(slots=True)
class Erasures:
    """Slots to be erased. They are not free until then."""

    evicted: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    """Nothing of them may remain in any file."""

    def add(self, others: Erasures) -> None:
        self.evicted += others.evicted
        self.forgotten += others.forgotten

    def __bool__(self) -> bool:
        return bool(self.evicted or self.forgotten)


class DiskState:
    def __init__(self, copies: CopySet, queue: WriteQueue) -> None:
        self.lock = threading.Lock()
        self.copies = copies
        self.queue = queue
        self.erasures = Erasures()
        self.touched: dict[TierCopy, None] = {}
        """Their hits are not in the index yet."""
        self.read_failures: dict[TierCopy, int] = {}
        self.fault: str | None = None
        """Why the last write failed."""
        self.is_full = False
        """The last group found nothing to evict."""
        self.num_to_refuse = 0
        """Offers to refuse at once, because nothing could be evicted for the last ones."""
        self.num_stored = 0
        self.num_skipped = 0
        self.num_evicted = 0
        self.num_damaged = 0
        self.wake: Callable[[], None] = lambda: None
        """Called with the lock held when there is something to erase."""

    def drop(self, copies: Iterable[TierCopy], *, is_forgotten: bool, is_told: bool) -> list[TierCopy]:
        """With the lock: these and all below them are GONE, their slots will be erased, queued writes are cancelled.
        What is being written now is erased by the writer. `is_told`: the engine learns of it by `poll`."""
        dropped = self.copies.drop(copies)
        slots = self.forget_slots(dropped)
        (self.erasures.forgotten if is_forgotten else self.erasures.evicted).extend(slots)
        self.queue.drop_gone()
        self.num_to_refuse = 0
        if is_told:
            self.copies.tell(dropped)
        if slots:
            self.wake()
        return dropped

    def take_erasures(self) -> Erasures:
        """With the lock."""
        erasures, self.erasures = self.erasures, Erasures()
        return erasures

    def forget_slots(self, dropped: Iterable[TierCopy]) -> list[int]:
        """With the lock: the slots of copies that are GONE, which have them no more."""
        slots: list[int] = []
        for copy in dropped:
            self.touched.pop(copy, None)
            self.read_failures.pop(copy, None)
            if copy.slot >= 0:
                slots.append(copy.slot)
                copy.slot = -1
        return slots

    def read_failed(self, copy: TierCopy, is_damaged: bool) -> None:
        """A record that is not what it should be goes at once, with all below it; an I/O error may pass."""
        with self.lock:
            if copy.state is not CopyState.STORED:
                return  # removed during the read: whatever was read there means nothing
            if is_damaged:
                self.num_damaged += 1
            else:
                self.read_failures[copy] = self.read_failures.get(copy, 0) + 1
                if self.read_failures[copy] < NUM_READ_FAILURES:
                    return
            self.drop([copy], is_forgotten=False, is_told=True)
