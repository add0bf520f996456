"""Blocks on disk: accepted into a bounded queue, written in groups by one thread, read and proven by others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ..store.record import MAX_EXTRA_BYTES, BadRecordError
from .copy_set import CopySet
from .disk_state import DiskState
from .group_writer import ALL_PINNED, GroupWriter
from .read_pool import ReadPool
from .read_rate import ReadRate
from .score import HitClock
from .store_writer import GROUP_AGE_S, GROUP_BYTES, StoreWriter
from .tier import BlockRecord, CopyState, LoadJob, Owners, TierCopy, TierStats
from .write_queue import QueuedBlock, WriteQueue

if TYPE_CHECKING:
    from ..store.directory import DiskStore
    from ..store.slab import Slab

QUEUE_BYTES = 64 << 20
WINDOW_BYTES = 64 << 20
NUM_READERS = 2
RUN_BYTES = 3 << 20
"""Neighbours on the disk are read with one call. Measured with blocks of 0.7 MB: two threads that read four blocks at
a time come to 0.94 of a plain sequential read, three that read one by one to between 0.4 and 0.9, since each of them
alone looks random to the kernel's own reading ahead."""
CLOSE_S = 5.0
WAIT_S = 60.0
"""For callers who want the disk to be as they said when they go on: clearing, a lower quota."""
READ_RATE = "disk_read_bytes_per_s"
PROBE_BYTES = 8 << 20
MIN_PROBE_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class DiskTier:
    """A `LowerTier` over one slab of a store. `copies` may be called as soon as it exists."""

    name = "disk"

    def __init__(
        self,
        store: DiskStore,
        slab: Slab,
        *,
        queue_bytes: int = QUEUE_BYTES,
        window_bytes: int = WINDOW_BYTES,
        group_age_s: float = GROUP_AGE_S,
        group_bytes: int = GROUP_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`monotonic` decides the age of groups and the back-off; deadlines of loads are real time."""
        self.image_bytes = slab.payload_bytes
        self.on_change: Callable[[], None] = lambda: None
        self._store, self._slab, self._monotonic = store, slab, monotonic
        self._used_bytes = store.space.used_bytes()
        hit_clock = HitClock(store.clock, monotonic)
        self._state = DiskState(CopySet(self.image_bytes, hit_clock), WriteQueue(self.image_bytes, queue_bytes))
        self._state.copies.adopt(slab.stored())
        self._rate = ReadRate(float(store.constant(READ_RATE, 0.0)))
        self._reads = ReadPool(
            self._read_run,
            _is_neighbour,
            lambda copy, error: self._state.read_failed(copy, isinstance(error, BadRecordError)),
            self._end_read,
            lambda: self.on_change(),
            self._rate,
            buffer_bytes=self.image_bytes,
            window_bytes=window_bytes,
            run_blocks=max(1, RUN_BYTES // self.image_bytes),
            num_threads=NUM_READERS,
        )
        self._writer = StoreWriter(
            self._state,
            GroupWriter(store, slab, self._state),
            self._written,
            monotonic,
            group_age_s=group_age_s,
            group_bytes=min(group_bytes, queue_bytes // 2),
        )
        self._saved_rate = self._rate.bytes_per_s
        self._is_closed = False

    # -- engine thread

    def copies(self) -> Sequence[TierCopy]:
        with self._state.lock:
            return self._state.copies.stored()

    def store(
        self, record: BlockRecord, parent: TierCopy | None, image: memoryview, owners: Owners, is_pinned: bool
    ) -> TierCopy | None:
        if len(record.extra) > MAX_EXTRA_BYTES:
            return None
        state = self._state
        with state.lock:
            if not self._accepts(parent) or (buffer := state.queue.take_buffer()) is None:
                state.num_skipped += 1
                return None
        state.queue.fill(buffer, image)
        with state.lock:
            if not self._accepts(parent):  # the writer dropped the parent meanwhile
                state.queue.give_back(buffer)
                return None
            copy = state.copies.add(record, parent, int(is_pinned))
            state.queue.put(QueuedBlock(copy, owners, buffer, self._monotonic()))
            self._writer.queued()
            return copy

    def _accepts(self, parent: TierCopy | None) -> bool:
        if self._state.num_to_refuse:
            self._state.num_to_refuse -= 1
            return False
        return not self._is_closed and (parent is None or parent.state is not CopyState.GONE)

    def start_load(self, copies: Sequence[TierCopy], deadline_s: float) -> LoadJob:
        with self._state.lock:
            readable = self._state.copies.begin_read(copies)
        return self._reads.start(readable, deadline_s)

    def touch(self, copies: Sequence[TierCopy]) -> None:
        with self._state.lock:
            self._state.copies.touch(copies)
            self._state.touched.update(dict.fromkeys(copies))
            self._state.wake()

    def pin(self, copies: Sequence[TierCopy], is_pinned: bool) -> None:
        with self._state.lock:
            self._state.copies.pin(copies, is_pinned)
            self._state.num_to_refuse = 0

    def remove(self, copies: Sequence[TierCopy], *, is_forgotten: bool) -> None:
        with self._state.lock:
            self._state.drop(copies, is_forgotten=is_forgotten, is_told=False)

    def poll(self) -> Sequence[TierCopy]:
        with self._state.lock:
            return self._state.copies.take_changes()

    # -- any thread

    def flush(self, timeout_s: float) -> bool:
        return self._writer.flush(timeout_s)

    def stats(self) -> TierStats:
        state = self._state
        with state.lock:
            return TierStats(
                num_blocks=state.copies.num_stored,
                num_queued=len(state.copies) - state.copies.num_stored,
                used_bytes=self._used_bytes,
                limit_bytes=self._store.space.quota_bytes,
                read_bytes_per_s=self._rate.bytes_per_s,
                num_loaded=self._reads.num_loaded,
                num_stored=state.num_stored,
                num_skipped=state.num_skipped,
                num_evicted=state.num_evicted,
                num_damaged=state.num_damaged,
                notice=self._notice,
            )

    @property
    def _notice(self) -> str | None:
        return self._state.fault or (ALL_PINNED if self._state.is_full else None)

    def close(self) -> None:
        """Waits a few seconds at most. A disk that hangs keeps its threads and the slab's file until it returns."""
        with self._state.lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        is_ended = self._writer.close(CLOSE_S)
        is_quiet = self._reads.close(CLOSE_S / 5)
        if is_ended and is_quiet:
            self._store.release(self)
        else:
            threading.Thread(target=self._release_late, name="chatkv-disk-close", daemon=True).start()

    def _release_late(self) -> None:
        """When the disk has come back, the slab can be used again."""
        self._writer.close(None)
        self._reads.close(None)
        self._store.release(self)

    # -- the store's own wishes

    def discard_slots(self, slots: Collection[int]) -> None:
        """Their records were found to be bad: they and all below them go."""
        wanted = set(slots)
        with self._state.lock:
            bad = [copy for copy in self._state.copies.stored() if copy.slot in wanted]
            self._state.num_damaged += len(bad)
            self._state.drop(bad, is_forgotten=False, is_told=True)
        self.on_change()

    def shrink(self, num_bytes: int) -> None:
        """Evict and punch until the directory is that much smaller, or nothing may be evicted. Waits for it, so the
        caller must not hold the lock of the store's space."""
        with self._state.lock:
            self._state.num_to_refuse = 0
        self._writer.shrink(num_bytes, WAIT_S)

    def drop_all(self) -> None:
        """Every copy goes, nothing of them stays in any file. Waits for it."""
        with self._state.lock:
            self._state.drop(self._state.copies.live(), is_forgotten=True, is_told=True)
        self.on_change()
        self._writer.flush(WAIT_S)

    # -- the tier's threads

    def _read_run(self, copies: Sequence[TierCopy], memories: Sequence[memoryview]) -> tuple[int, Exception | None]:
        first_slot = copies[0].slot
        if first_slot < 0:
            return 0, BadRecordError("removed meanwhile")
        return self._slab.read_run(first_slot, memories, [copy.record for copy in copies])

    def _end_read(self, copies: Sequence[TierCopy]) -> None:
        with self._state.lock:
            self._state.copies.end_read(copies)

    def _written(self) -> None:
        """On the writer thread, after each piece of work."""
        self._store.notice = self._notice
        self.on_change()
        try:
            self._used_bytes = self._store.space.used_bytes()
            if not self._rate.bytes_per_s:
                self._probe()
            if abs(self._rate.bytes_per_s - self._saved_rate) > 0.2 * self._saved_rate:
                self._saved_rate = self._rate.bytes_per_s
                self._store.set_constant(READ_RATE, self._saved_rate)
        except Exception:
            logger.warning("the store could not be measured", exc_info=True)

    def _probe(self) -> None:
        """The first blocks ever stored are read back, so that the first decision to load or to compute has a number."""
        with self._state.lock:
            copies = self._state.copies.stored()[-(PROBE_BYTES // self.image_bytes) :]
            copies = self._state.copies.begin_read(copies)
        try:
            if len(copies) * self.image_bytes < MIN_PROBE_BYTES:
                return
            self._slab.drop_cache()
            memory = memoryview(bytearray(self.image_bytes))
            since = time.perf_counter()
            for copy in copies:
                _, error = self._read_run([copy], [memory])
                if error is not None:
                    raise error
            self._reads.add_sample(len(copies) * self.image_bytes / (time.perf_counter() - since))
        finally:
            self._end_read(copies)


def _is_neighbour(copy: TierCopy, next_copy: TierCopy) -> bool:
    """One read can fetch both."""
    return 0 <= copy.slot == next_copy.slot - 1
