"""Blocks in host memory: one slab of images, allocated once. Absent when the device is the CPU, whose pool is that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .copy_set import CopySet
from .locked_memory import LockedMemory, PageLocker
from .read_rate import ReadRate
from .score import HitClock
from .tier import BlockRecord, CopyState, LoadJob, Owners, TierCopy, TierStats

ALL_PINNED = "The memory for cached chats holds nothing but pinned chats: new blocks are not kept there."


class HostTier:
    """A `LowerTier` that stores and loads at once. The images of a load lie in the slab itself."""

    name = "host"

    def __init__(
        self,
        image_bytes: int,
        limit_bytes: int,
        *,
        locker: PageLocker | None = None,
        hit_clock: HitClock | None = None,
    ) -> None:
        """locker: locks the memory for a device, which can then copy by itself. Raises ValueError when `limit_bytes`
        does not hold one image."""
        if limit_bytes < image_bytes:
            raise ValueError(f"a host tier of {limit_bytes} bytes holds no block of {image_bytes}")
        self.image_bytes = image_bytes
        self.on_change: Callable[[], None] = lambda: None
        num_slots = limit_bytes // image_bytes
        self._memory = LockedMemory(num_slots * image_bytes, image_bytes, locker)
        self._slab = memoryview(self._memory.bytes.numpy().data)
        self._limit_bytes = num_slots * image_bytes
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._lock = threading.Lock()
        self._copies = CopySet(image_bytes, hit_clock or HitClock())
        self._forgotten: set[TierCopy] = set()
        """Their images are wiped when nobody reads them any more."""
        self._rate = ReadRate()
        self._num_loaded = self._num_stored = self._num_skipped = self._num_evicted = 0
        self._notice: str | None = None

    def copies(self) -> Sequence[TierCopy]:
        with self._lock:
            return self._copies.stored()

    def store(
        self, record: BlockRecord, parent: TierCopy | None, image: memoryview, owners: Owners, is_pinned: bool
    ) -> TierCopy | None:
        with self._lock:
            if parent is not None and parent.state is not CopyState.STORED:
                return None
            copy = self._copies.add(record, parent, int(is_pinned))
            if not self._free_slots and not self._evict():
                self._copies.drop([copy])
                self._num_skipped += 1
                self._notice = ALL_PINNED
                return None
            self._notice = None
            copy.slot = self._free_slots.pop()
            self._memory.reach(copy.slot * self.image_bytes)
            since = time.perf_counter()
            self._image(copy.slot)[:] = image
            self._rate.add_sample(self.image_bytes / max(time.perf_counter() - since, 1e-9))
            self._copies.set_stored([copy])
            self._num_stored += 1
            return copy

    def start_load(self, copies: Sequence[TierCopy], deadline_s: float) -> LoadJob:
        with self._lock:
            load = _HostLoad(self, self._copies.begin_read(copies))
        self.on_change()
        return load

    def touch(self, copies: Sequence[TierCopy]) -> None:
        with self._lock:
            self._copies.touch(copies)

    def pin(self, copies: Sequence[TierCopy], is_pinned: bool) -> None:
        with self._lock:
            self._copies.pin(copies, is_pinned)

    def remove(self, copies: Sequence[TierCopy], *, is_forgotten: bool) -> None:
        with self._lock:
            dropped = self._copies.drop(copies)
            if is_forgotten:
                self._forgotten.update(dropped)
            for copy in dropped:
                if not copy.num_readers:  # else the last reader frees the slot
                    self._free_slot(copy)

    def poll(self) -> Sequence[TierCopy]:
        with self._lock:
            return self._copies.take_changes()

    def flush(self, timeout_s: float) -> bool:
        return True

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                num_blocks=self._copies.num_stored,
                num_queued=0,
                used_bytes=self._limit_bytes - len(self._free_slots) * self.image_bytes,
                limit_bytes=self._limit_bytes,
                read_bytes_per_s=self._rate.bytes_per_s,
                num_loaded=self._num_loaded,
                num_stored=self._num_stored,
                num_skipped=self._num_skipped,
                num_evicted=self._num_evicted,
                notice=self._notice,
            )

    def close(self) -> None:
        """The memory goes with the object."""
        self._memory.close()

    def _image(self, slot: int) -> memoryview:
        return self._slab[slot * self.image_bytes : (slot + 1) * self.image_bytes]

    def _evict(self) -> bool:
        victim = self._copies.leaves.pop()
        if victim is None:
            return False
        victim.is_evicted = True
        self._copies.tell(self._copies.drop([victim]))
        self._free_slot(victim)
        self._num_evicted += 1
        return True

    def _free_slot(self, copy: TierCopy) -> None:
        if copy in self._forgotten:
            self._forgotten.remove(copy)
            self._image(copy.slot)[:] = bytes(self.image_bytes)
        self._free_slots.append(copy.slot)
        copy.slot = -1

    def _give(self, copies: Sequence[TierCopy]) -> list[memoryview]:
        with self._lock:
            self._num_loaded += len(copies)
            return [self._image(copy.slot) for copy in copies]

    def _end_read(self, copies: Sequence[TierCopy]) -> None:
        with self._lock:
            self._copies.end_read(copies)
            for copy in copies:
                if copy.state is CopyState.GONE and not copy.num_readers and copy.slot >= 0:
                    self._free_slot(copy)


class _HostLoad:
    """A `LoadJob`. Copies are held until their images are given back."""

    def __init__(self, tier: HostTier, copies: Sequence[TierCopy]) -> None:
        self._tier = tier
        self._waiting = copies
        self._given: dict[int, tuple[memoryview, TierCopy]] = {}

    def take(self) -> list[memoryview]:
        is_alive = [copy.state is CopyState.STORED for copy in self._waiting]
        num_taken = is_alive.index(False) if False in is_alive else len(is_alive)
        taken, left, self._waiting = self._waiting[:num_taken], self._waiting[num_taken:], []
        images = self._tier._give(taken)
        self._given.update({id(image): (image, copy) for image, copy in zip(images, taken, strict=True)})
        self._tier._end_read(left)
        return images

    def release(self, image: memoryview) -> None:
        self._tier._end_read([self._given.pop(id(image))[1]])

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def cancel(self) -> None:
        left, self._waiting = self._waiting, []
        self._tier._end_read(left)
