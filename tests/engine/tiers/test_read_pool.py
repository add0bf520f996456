"""Loads: in order, proven, bounded in memory; late, cancelled and failing reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from tier_blocks import IMAGE_BYTES, WAIT_S, Changes, chain, image, load_all

from chatkv.engine.tiers.read_pool import MAX_LOST_READS, ReadPool
from chatkv.engine.tiers.read_rate import ReadRate
from chatkv.engine.tiers.tier import CopyState, TierCopy


def stored_chain(num_blocks: int, number: int = 0) -> list[TierCopy]:
    copies: list[TierCopy] = []
    for slot, record in enumerate(chain(num_blocks, number)):
        copies.append(TierCopy(record, copies[-1] if copies else None, slot, CopyState.STORED))
    return copies


class Disk:
    """Answers reads; `gates` holds those of a position back until its event is set, `errors` fails them."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.gates: dict[int, threading.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.started: list[int] = []
        self.returned: list[int] = []
        self.runs: list[list[int]] = []
        self.memories: set[int] = set()
        self.failed: list[tuple[TierCopy, Exception]] = []
        self.settled: list[Sequence[TierCopy]] = []
        self._lock = threading.Lock()

    def read(self, copies: Sequence[TierCopy], memories: Sequence[memoryview]) -> tuple[int, Exception | None]:
        positions = [copy.record.position for copy in copies]
        with self._lock:
            self.started += positions
            self.runs.append(positions)
        for position in positions:
            if gate := self.gates.get(position):
                assert gate.wait(WAIT_S)
        for copy, memory in zip(copies, memories, strict=True):
            memory[:] = image(copy.record)
        with self._lock:
            self.returned += positions
        for number, position in enumerate(positions):
            if position in self.errors:
                return number, self.errors[position]
        return len(copies), None

    def pool(self, window_blocks: int = 8, num_threads: int = 3, run_blocks: int = 1) -> ReadPool:
        return ReadPool(
            self.read,
            lambda copy, next_copy: next_copy.slot == copy.slot + 1,
            lambda copy, error: self.failed.append((copy, error)),
            self.settled.append,
            self.changes,
            ReadRate(),
            buffer_bytes=IMAGE_BYTES,
            window_bytes=window_blocks * IMAGE_BYTES,
            run_blocks=run_blocks,
            num_threads=num_threads,
        )


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    for gate in disk.gates.values():
        gate.set()


@pytest.fixture
def make_pool(disk: Disk) -> Iterator[Callable[..., ReadPool]]:
    pools: list[ReadPool] = []

    def make(*args: int) -> ReadPool:
        pools.append(disk.pool(*args))
        return pools[-1]

    yield make
    for gate in disk.gates.values():
        gate.set()
    for pool in pools:
        pool.close(WAIT_S)


def images_of(copies: Sequence[TierCopy]) -> list[bytes]:
    return [bytes(image(copy.record)) for copy in copies]


def test_a_load_longer_than_the_window_comes_in_order(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    copies = stored_chain(100)
    job = make_pool(4).start(copies, WAIT_S)
    assert load_all(job, disk.changes) == images_of(copies)
    disk.changes.wait_for(lambda: disk.settled == [copies])


def test_nothing_is_given_past_a_gap(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    disk.gates[1] = threading.Event()
    copies = stored_chain(5)
    job = make_pool(8).start(copies, WAIT_S)
    disk.changes.wait_for(lambda: set(disk.returned) == {0, 2, 3, 4})
    taken = job.take()
    assert [bytes(view) for view in taken] == images_of(copies[:1])
    assert not job.is_done
    disk.gates[1].set()
    assert load_all(job, disk.changes) == images_of(copies[1:])


def test_no_more_is_read_than_the_window_holds_until_images_come_back(
    disk: Disk, make_pool: Callable[..., ReadPool]
) -> None:
    job = make_pool(4).start(stored_chain(10), WAIT_S)
    disk.changes.wait_for(lambda: len(disk.returned) == 4)
    views = job.take()
    while len(views) < 4:
        views += job.take()
    assert len(disk.started) == 4
    job.release(views[0])
    disk.changes.wait_for(lambda: len(disk.started) == 5)
    assert len(disk.started) == 5


@pytest.mark.parametrize("position", [0, 3, 9])
def test_a_failed_read_keeps_the_good_leading_part(
    disk: Disk, make_pool: Callable[..., ReadPool], position: int
) -> None:
    disk.errors[position] = OSError(5, "I/O error")
    copies = stored_chain(10)
    job = make_pool(4).start(copies, WAIT_S)
    assert load_all(job, disk.changes) == images_of(copies[:position])
    disk.changes.wait_for(lambda: [copy for copy, _ in disk.failed[:1]] == [copies[position]])


def test_c5_a_hung_read_is_given_up_and_blocks_nobody(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    disk.gates[7] = threading.Event()
    pool = make_pool(4, 1)
    late_copies, other_copies = stored_chain(9), stored_chain(6, 1)
    job = pool.start(late_copies, 0.2)
    assert load_all(job, disk.changes) == images_of(late_copies[:7])
    assert load_all(pool.start(other_copies, WAIT_S), disk.changes) == images_of(other_copies)
    # It returns after all: nobody sees what it read, and its memory is not used by anybody meanwhile.
    disk.gates[7].set()
    disk.changes.wait_for(lambda: disk.returned.count(7) == 1)
    assert job.take() == []
    assert pool.close(WAIT_S)


def test_c5_a_hung_read_does_not_hold_up_closing(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    disk.gates[0] = threading.Event()
    pool = make_pool(4, 1)
    job = pool.start(stored_chain(2), 60.0)
    disk.changes.wait_for(lambda: disk.started == [0])
    assert not pool.close(0.05)
    assert job.is_done
    assert job.take() == []


def test_with_too_many_hung_reads_a_load_is_a_miss_at_once_until_they_return(
    disk: Disk, make_pool: Callable[..., ReadPool]
) -> None:
    pool = make_pool(4, 1)
    disk.gates[0] = threading.Event()
    for _ in range(MAX_LOST_READS):
        job = pool.start(stored_chain(1), 0.02)
        assert load_all(job, disk.changes) == []
    assert pool.start(stored_chain(1), 60.0).is_done
    disk.gates[0].set()
    copies = stored_chain(1)
    disk.changes.wait_for(lambda: load_all(pool.start(copies, WAIT_S), disk.changes) == images_of(copies))


def test_a_cancelled_load_gives_nothing_and_lets_go_of_its_copies(
    disk: Disk, make_pool: Callable[..., ReadPool]
) -> None:
    disk.gates[2] = threading.Event()
    pool = make_pool(4)
    copies = stored_chain(8)
    job = pool.start(copies, WAIT_S)
    disk.changes.wait_for(lambda: {0, 1, 3} <= set(disk.returned))
    (view, *others) = job.take()
    kept = bytes(view)
    job.cancel()
    assert job.is_done
    assert disk.settled == [copies]
    disk.gates[2].set()
    assert job.take() == []
    # What was given stays valid until it comes back, whatever is loaded meanwhile.
    other_copies = stored_chain(20, 1)
    assert load_all(pool.start(other_copies, WAIT_S), disk.changes) == images_of(other_copies)
    assert bytes(view) == kept
    for one in (view, *others):
        job.release(one)


def test_loads_take_turns(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    pool = make_pool(2, 1)
    disk.gates[0] = threading.Event()
    first = pool.start(stored_chain(50), WAIT_S)
    second = pool.start(stored_chain(1, 1), WAIT_S)
    disk.gates[0].set()
    assert len(load_all(second, disk.changes)) == 1
    assert len(load_all(first, disk.changes)) == 50


def test_a_copy_that_was_removed_ends_the_load(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    copies = stored_chain(4)
    job = make_pool(8).start(copies, WAIT_S)
    disk.changes.wait_for(lambda: len(disk.returned) == 4 and bool(disk.settled))
    copies[2].state = CopyState.GONE
    assert load_all(job, disk.changes) == images_of(copies[:2])
    assert len(disk.settled) == 1


def test_neighbours_are_read_together_and_a_run_waits_for_all_its_buffers(
    disk: Disk, make_pool: Callable[..., ReadPool]
) -> None:
    copies = stored_chain(12)
    for copy in copies[5:]:
        copy.slot += 100
    job = make_pool(6, 1, 4).start(copies, WAIT_S)
    disk.changes.wait_for(lambda: len(disk.returned) == 5)
    views = job.take()
    while len(views) < 5:
        views += job.take()
    for view in views[:2]:
        job.release(view)
    assert disk.runs == [[0, 1, 2, 3], [4]]
    job.release(views[2])  # one buffer was free already: the next four have room together
    disk.changes.wait_for(lambda: len(disk.returned) == 9)
    for view in views[3:]:
        job.release(view)
    assert load_all(job, disk.changes) == images_of(copies[5:])
    assert disk.runs == [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("position", [0, 2, 3, 9])
def test_what_is_bad_within_a_run_keeps_the_good_leading_part(
    disk: Disk, make_pool: Callable[..., ReadPool], position: int
) -> None:
    disk.errors[position] = OSError(5, "I/O error")
    copies = stored_chain(10)
    pool = make_pool(8, 2, 4)
    assert load_all(pool.start(copies, WAIT_S), disk.changes) == images_of(copies[:position])
    disk.changes.wait_for(lambda: [copy for copy, _ in disk.failed] == [copies[position]])
    disk.errors.clear()  # every buffer came back
    for _ in range(3):
        assert load_all(pool.start(copies, WAIT_S), disk.changes) == images_of(copies)


def test_c5_a_hung_run_takes_all_its_buffers_with_it_until_it_returns(
    disk: Disk, make_pool: Callable[..., ReadPool]
) -> None:
    disk.gates[6] = threading.Event()
    pool = make_pool(4, 1, 4)
    late_copies, other_copies = stored_chain(9), stored_chain(6, 1)
    assert load_all(pool.start(late_copies, 0.2), disk.changes) == images_of(late_copies[:4])
    assert load_all(pool.start(other_copies, WAIT_S), disk.changes) == images_of(other_copies)
    disk.gates[6].set()
    disk.changes.wait_for(lambda: disk.returned.count(6) == 1)
    assert load_all(pool.start(late_copies, WAIT_S), disk.changes) == images_of(late_copies)
    assert pool.close(WAIT_S)


def test_an_empty_load_is_done(disk: Disk, make_pool: Callable[..., ReadPool]) -> None:
    job = make_pool().start([], WAIT_S)
    assert job.is_done
    assert job.take() == []
    assert disk.settled == [[]]


def test_rate_counts_the_time_with_reads_under_way() -> None:
    rate = ReadRate()
    for begin in (0.0, 100.0):
        rate.begin(begin)
        rate.begin(begin + 0.5)
        rate.end(begin + 0.75, 8 << 20)
        rate.end(begin + 1.0, 8 << 20)
    assert rate.bytes_per_s == pytest.approx(16 << 20)
    rate.begin(200.0)
    rate.give_up()
    assert rate.bytes_per_s == pytest.approx(16 << 20)
