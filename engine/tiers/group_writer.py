"""How a group of blocks gets onto the disk: room, records, one data sync, owners, index; only then STORED."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .disk_state import DiskState, Erasures
from .tier import BlockRecord, CopyState, TierCopy
from .write_queue import QueuedBlock

if TYPE_CHECKING:
    from ..store.directory import DiskStore
    from ..store.slab import Slab

ALL_PINNED = (
    "The disk space for cached chats is used up and nothing in it may be evicted: new blocks are not stored. "
    "Raise the limit, or unpin a chat if any is pinned."
)
MAX_REFUSED_OFFERS = 1024


class GroupWriter:
    """Runs on the writer thread alone."""

    def __init__(self, store: DiskStore, slab: Slab, state: DiskState) -> None:
        self._store, self._slab, self._state = store, slab, state
        self._num_refused = 0

    def write(self, blocks: Sequence[QueuedBlock]) -> None:
        """Parents first. Raises what the disk, the index or `on_owned` raised: then nothing of the group is visible,
        and its copies are GONE. Buffers are given back in any case."""
        try:
            with self._store.space.lock:
                try:
                    slots = self._take_slots(len(blocks))
                    written = self._write(blocks[: len(slots)], slots)
                finally:
                    with self._state.lock:
                        for block in blocks:
                            self._state.queue.give_back(block.buffer)
                self._commit(written)
        except BaseException:
            with self._state.lock:
                self._state.drop([block.copy for block in blocks], is_forgotten=False, is_told=True)
            raise
        self._finish(written)
        self._refuse(blocks[len(slots) :])

    def erase(self, erasures: Erasures) -> None:
        """Raises OSError, BrokenIndexError: what is left in `erasures` is to be tried again."""
        with self._store.space.lock:
            if erasures.evicted:
                self._slab.erase(erasures.evicted)
                erasures.evicted.clear()
            if erasures.forgotten:
                self._slab.erase(erasures.forgotten, is_forgotten=True)
                erasures.forgotten.clear()

    def save_hits(self) -> None:
        """Loses nothing that matters when it fails: hits decide only what is evicted first."""
        with self._state.lock:
            rows = [(copy.slot, copy.hits, copy.hit_at_s) for copy in self._state.touched if copy.slot >= 0]
            self._state.touched.clear()
        with self._store.space.lock:
            if rows and not self._store.space.lack_bytes(0, len(rows)):
                self._slab.set_hits(rows)

    def shrink(self, num_bytes: int) -> None:
        """Evict and punch until the directory is that much smaller, or nothing may be evicted."""
        with self._store.space.lock:
            goal = self._store.space.used_bytes() - num_bytes
            while (lack := self._store.space.used_bytes() - goal) > 0 and self._make_room(lack, is_punched=True):
                pass

    # -- room

    def _take_slots(self, count: int) -> list[int]:
        """As many as there is room for. Evicted slots are reused as they are; ranges are punched only where that did
        not help, as after the limit was lowered."""
        new_bytes = self._slab.new_bytes
        slots = [self._slab.take_slot() for _ in range(count)]
        is_punched = False
        try:
            while slots:
                slots.sort(key=lambda slot: (new_bytes(slot), slot))
                lack = self._lack(slots)
                if not lack:
                    break
                if self._make_room(lack, is_punched=is_punched):
                    is_punched = True
                    self._exchange(slots)
                    continue
                num_fitting = bisect_left(range(1, len(slots)), True, key=lambda n: self._lack(slots[:n]) > 0)
                while len(slots) > num_fitting:  # the last of the chain go without
                    self._slab.give_back(slots.pop())
        except BaseException:
            for slot in slots:
                self._slab.give_back(slot)
            raise
        return slots

    def _lack(self, slots: Sequence[int]) -> int:
        return self._store.space.lack_bytes(sum(map(self._slab.new_bytes, slots)), len(slots))

    def _exchange(self, slots: list[int]) -> None:
        """Those that would newly allocate, for what was evicted."""
        num_wanted = len(slots)
        while slots and self._slab.new_bytes(slots[-1]):
            self._slab.give_back(slots.pop())
        slots.extend(self._slab.take_slot() for _ in range(num_wanted - len(slots)))

    def _make_room(self, num_bytes: int, *, is_punched: bool) -> bool:
        """Evict what is worth least, of our own or of models that are not in use. False: nothing may be evicted."""
        with self._state.lock:
            found = self._state.copies.leaves.peek()
        hit_at_s = math.inf if found is None else found[1].hit_at_s
        is_elsewhere = self._store.oldest_elsewhere(hit_at_s) is not None
        with self._state.lock:
            slots = [] if is_elsewhere else self._pop_victims(-(-num_bytes // self._slab.slot_bytes))
        if slots:
            try:
                self._slab.erase(slots, is_punched=is_punched)
            except BaseException:
                with self._state.lock:
                    self._state.erasures.evicted.extend(slots)
                raise
        elif is_elsewhere:
            self._store.evict_elsewhere(num_bytes)
        return bool(slots) or is_elsewhere

    def _pop_victims(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count and (victim := self._state.copies.leaves.pop()) is not None:
            victim.is_evicted = True
            dropped = self._state.copies.drop([victim])
            self._state.copies.tell(dropped)
            self._state.num_evicted += len(dropped)
            slots.extend(self._state.forget_slots(dropped))
        return slots

    # -- write

    def _write(self, blocks: Sequence[QueuedBlock], slots: Sequence[int]) -> list[tuple[QueuedBlock, int]]:
        """What was cancelled meanwhile is not written."""
        free = list(reversed(slots))
        written: list[tuple[QueuedBlock, int]] = []
        try:
            for block in blocks:
                if block.copy.state is CopyState.QUEUED:
                    slot = free.pop()
                    written.append((block, slot))
                    self._slab.write(slot, block.copy.record, block.buffer.memory)
            self._slab.sync()
        except BaseException:
            self._take_back(written)
            raise
        finally:
            for slot in free:
                self._slab.give_back(slot)
        return written

    def _commit(self, written: Sequence[tuple[QueuedBlock, int]]) -> None:
        kept = [(block, slot) for block, slot in written if block.copy.state is CopyState.QUEUED]
        owned = [(owner, block.copy.record.block_hash) for block, _ in kept for owner in sorted(block.owners())]
        try:
            if owned and self._store.on_owned is not None:
                self._store.on_owned(self._slab.fingerprint, owned)
            if kept:
                self._slab.commit([_row(block.copy, slot) for block, slot in kept])
        except BaseException:
            self._take_back(written)
            raise

    def _take_back(self, written: Sequence[tuple[QueuedBlock, int]]) -> None:
        """Erased, not given back: no header of theirs may be found when the index is rebuilt."""
        with self._state.lock:
            self._state.erasures.forgotten.extend(slot for _, slot in written)

    def _finish(self, written: Sequence[tuple[QueuedBlock, int]]) -> None:
        stored: list[TierCopy] = []
        with self._state.lock:
            for block, slot in written:
                if block.copy.state is CopyState.QUEUED:
                    block.copy.slot = slot
                    stored.append(block.copy)
                else:
                    self._state.erasures.forgotten.append(slot)
            self._state.copies.set_stored(stored)
            self._state.num_stored += len(stored)

    def _refuse(self, blocks: Sequence[QueuedBlock]) -> None:
        """There was no room. The next offers are refused without a try, more of them each time."""
        with self._state.lock:
            if blocks:
                self._state.drop([block.copy for block in blocks], is_forgotten=False, is_told=True)
                self._state.num_skipped += len(blocks)
                self._num_refused = min(MAX_REFUSED_OFFERS, 2 * self._num_refused or len(blocks))
                self._state.num_to_refuse = self._num_refused
            else:
                self._num_refused = 0
            self._state.is_full = bool(blocks)


def _row(copy: TierCopy, slot: int) -> tuple[int, BlockRecord, float, float]:
    return slot, copy.record, copy.hits, copy.hit_at_s
