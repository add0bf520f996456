"""Threads that read and verify blocks for loads, into a bounded window of bounce buffers.

A read can hang for as long as the disk likes, and nothing may wait for it: at its load's deadline the thread is given
up with its buffer, and another takes its place. When the read returns after all, nobody looks at what it read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .bounce import Buffer, BufferPool
from .load_job import LoadState
from .read_rate import ReadRate
from .tier import TierCopy

MAX_LOST_READS = 8
"""Reads that hang at the same time; beyond it no thread is replaced, and with none left every load is a miss."""


class _Reading:
    """What one thread is at: a run of neighbours. `is_lost`: given up, the thread ends when it returns."""

    __slots__ = ("buffers", "indices", "is_lost", "load")

    def __init__(self, load: LoadState, indices: range, buffers: list[Buffer]) -> None:
        self.load, self.indices, self.buffers = load, indices, buffers
        self.is_lost = False


class ReadPool:
    """`read(copies, memories)` fills buffers with a run of neighbours, at most `run_blocks`, and proves them; it gives
    the number of good leading ones and what is wrong with the next. `on_failed(copy, error)` and `on_settled(copies)`
    are called without the lock, on any thread; `on_settled` exactly once per load."""

    def __init__(
        self,
        read: Callable[[Sequence[TierCopy], Sequence[memoryview]], tuple[int, Exception | None]],
        is_neighbour: Callable[[TierCopy, TierCopy], bool],
        on_failed: Callable[[TierCopy, Exception], None],
        on_settled: Callable[[Sequence[TierCopy]], None],
        on_change: Callable[[], None],
        rate: ReadRate,
        *,
        buffer_bytes: int,
        window_bytes: int,
        run_blocks: int = 1,
        num_threads: int = 3,
        name: str = "disk",
    ) -> None:
        self._read, self._is_neighbour, self._run_blocks = read, is_neighbour, run_blocks
        self._on_failed, self._on_settled, self._on_change = on_failed, on_settled, on_change
        self._rate = rate
        self._name = name
        self._buffers = BufferPool(buffer_bytes, max(2, window_bytes // buffer_bytes))
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._watch = threading.Condition(self._lock)
        self._loads: list[LoadState] = []
        """Those with something to read, or being read."""
        self._readings: set[_Reading] = set()
        self._num_lost = 0
        self._num_workers = 0
        self._max_workers = num_threads
        self._is_watched = False
        self._is_closed = False
        self.num_loaded = 0

    # -- engine thread

    def start(self, copies: Sequence[TierCopy], deadline_s: float) -> ReadJob:
        load = LoadState(copies, time.monotonic() + deadline_s)
        with self._lock:
            self._start_workers()
            if self._is_closed or not copies or not self._num_workers:
                load.cut(0)
            else:
                self._loads.append(load)
                self._work.notify(len(copies))
                self._watch.notify()
            settled = self._settle(load)
        self._tell(settled)
        return ReadJob(self, load)

    def take(self, load: LoadState) -> list[memoryview]:
        with self._lock:
            images, freed = load.give()
            self.num_loaded += len(images)
            self._free(freed)
            settled = self._settle(load)
        self._tell(settled, is_change=False)
        return images

    def release(self, load: LoadState, image: memoryview) -> None:
        with self._lock:
            self._free([load.take_back(image)])

    def cancel(self, load: LoadState) -> None:
        with self._lock:
            self._free(load.cut_to_given())
            settled = self._settle(load)
        self._tell(settled, is_change=False)

    def add_sample(self, bytes_per_s: float) -> None:
        """Of a read rate measured elsewhere."""
        with self._lock:
            self._rate.add_sample(bytes_per_s)

    def close(self, timeout_s: float | None) -> bool:
        """Ends every load and the threads; None: however long that takes. False: a read still hangs; its thread ends
        when it returns."""
        with self._lock:
            self._is_closed = True
            settled = [copies for load in list(self._loads) if (copies := self._cut_to_leading(load)) is not None]
            self._work.notify_all()
            self._watch.notify_all()
            is_quiet = self._watch.wait_for(lambda: not (self._num_workers or self._num_lost), timeout_s)
        for copies in settled:
            self._tell(copies)
        return is_quiet

    # -- threads

    def _start_workers(self) -> None:
        while self._num_workers < self._max_workers and self._num_lost < MAX_LOST_READS and not self._is_closed:
            self._num_workers += 1
            threading.Thread(target=self._run, name=f"chatkv-{self._name}-read", daemon=True).start()
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._run_watch, name=f"chatkv-{self._name}-deadline", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while (reading := self._next_reading()) is None:
                    if self._is_closed:
                        self._num_workers -= 1
                        self._watch.notify_all()
                        return
                    self._work.wait()
                self._readings.add(reading)
                self._rate.begin(time.monotonic())
            load, indices = reading.load, reading.indices
            copies = load.copies[indices.start : indices.stop]
            failure: Exception | None
            try:
                num_good, failure = self._read(copies, [buffer.memory for buffer in reading.buffers])
            except Exception as error:  # whatever it is, it is a miss
                num_good, failure = 0, error
            with self._lock:
                if reading.is_lost:
                    self._num_lost -= 1
                    for buffer in reading.buffers:
                        self._buffers.give_back(buffer)
                    self._watch.notify_all()
                    return
                self._readings.remove(reading)
                self._rate.end(time.monotonic(), num_good * self._buffers.buffer_bytes)
                num_before = load.num_leading
                for number, (index, buffer) in enumerate(zip(indices, reading.buffers, strict=True)):
                    self._free(load.finish_read(index, buffer, number < num_good))
                is_news = load.num_leading > num_before
                settled = self._settle(load)
            if failure is not None:
                self._on_failed(copies[num_good], failure)
            self._tell(settled, is_news or failure is not None)

    def _next_reading(self) -> _Reading | None:
        """Loads take turns run by run; none holds more than its share of the buffers. A run waits until there are
        buffers for the whole of it: shorter and shorter ones would follow otherwise."""
        if self._is_closed:
            return None
        wanting = [load for load in self._loads if load.wants_reading]
        share = max(1, self._buffers.num_buffers // max(1, len(wanting)))
        for load in wanting:
            max_blocks = min(self._run_blocks, share)
            num_blocks = load.num_in_run(max_blocks, self._is_neighbour)
            if num_blocks <= min(share - load.num_buffers, self._buffers.num_free):
                self._loads.remove(load)
                self._loads.append(load)
                indices = load.begin_read(num_blocks)
                return _Reading(load, indices, [buffer for _ in indices if (buffer := self._buffers.take())])
        return None

    def _run_watch(self) -> None:
        with self._lock:
            while not self._is_closed:
                now = time.monotonic()
                late = [load for load in self._loads if load.deadline_at <= now]
                settled = [copies for load in late if (copies := self._give_up(load)) is not None]
                if late:
                    self._lock.release()
                    for copies in settled:
                        self._tell(copies)
                    self._lock.acquire()
                    continue
                next_at = min((load.deadline_at for load in self._loads), default=None)
                self._watch.wait(None if next_at is None else next_at - now)

    def _give_up(self, load: LoadState) -> Sequence[TierCopy] | None:
        """The deadline has passed: what is ready comes, threads that still read for it are given up."""
        for reading in [reading for reading in self._readings if reading.load is load]:
            reading.is_lost = True
            self._readings.remove(reading)
            load.num_reading -= len(reading.indices)
            for buffer in reading.buffers:
                self._buffers.quarantine(buffer)
            self._rate.give_up()
            self._num_workers -= 1
            self._num_lost += 1
        self._start_workers()
        return self._cut_to_leading(load)

    # -- under the lock

    def _cut_to_leading(self, load: LoadState) -> Sequence[TierCopy] | None:
        self._free(load.cut_to_leading())
        return self._settle(load)

    def _free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._buffers.give_back(buffer)
        self._work.notify(len(buffers))

    def _settle(self, load: LoadState) -> Sequence[TierCopy] | None:
        """The copies that need not be held any more, once."""
        if load in self._loads and not load.wants_reading and not load.num_reading:
            self._loads.remove(load)
        if load.is_settled or not load.has_all:
            return None
        load.is_settled = True
        return load.copies

    def _tell(self, settled: Sequence[TierCopy] | None, is_change: bool = True) -> None:
        """Without the lock."""
        if settled is not None:
            self._on_settled(settled)
        if is_change:
            self._on_change()


class ReadJob:
    """A `LoadJob` of a pool."""

    def __init__(self, pool: ReadPool, load: LoadState) -> None:
        self._pool, self._load = pool, load

    def take(self) -> list[memoryview]:
        return self._pool.take(self._load)

    def release(self, image: memoryview) -> None:
        self._pool.release(self._load, image)

    @property
    def is_done(self) -> bool:
        return self._load.is_done

    def cancel(self) -> None:
        self._pool.cancel(self._load)
