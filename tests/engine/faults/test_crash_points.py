"""The power goes at any moment of a write, a delete, an eviction and a forget. Whatever is left of the files: what the
store gives afterwards is right, what was safe is there, and what was forgotten stays so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from disk_driver import Block, DiskDriver, chain, check_contents
from recording_files import CrashPoint, RecordingFiles, crash_points
from volume import Entry, Mark

from chatkv.engine.store import reader
from chatkv.engine.store.slab import Slab
from chatkv.engine.store.space import INDEX_RESERVE_BYTES

SLOT_BYTES = 8192
NUM_QUICK = 300


class Work:
    """What is done to a store, with marks of what it owed at each moment."""

    def __init__(self, directory: Path, *, is_encrypted: bool = False) -> None:
        directory.mkdir(mode=0o700)
        self.files = RecordingFiles(directory)
        self.driver = DiskDriver(directory, self.files, is_encrypted=is_encrypted)
        self.known: list[Block] = []
        self.forgotten: frozenset[bytes] = frozenset()

    def save(self, blocks: Sequence[Block]) -> None:
        self.known += blocks
        self.forgotten -= {block.name for block in blocks}
        self.mark()
        self.driver.save(blocks)
        self.mark()

    def remove(self, blocks: Sequence[Block], *, is_forgotten: bool) -> None:
        self.mark()
        self.driver.remove([block.name for block in blocks], is_forgotten=is_forgotten)
        if is_forgotten:
            self.forgotten |= {block.name for block in blocks}
        self.mark()

    def limit(self, num_blocks: int) -> None:
        """Room for so many blocks more."""
        store = self.driver.store
        self.mark()
        store.set_quota(store.space.used_bytes() + INDEX_RESERVE_BYTES + num_blocks * SLOT_BYTES)
        self.driver.settle()
        self.mark()

    def mark(self) -> None:
        self.files.log_entry(Mark(self.driver.alive, self.forgotten))

    def finish(self) -> list[Entry]:
        log = list(self.files.log)
        self.driver.close()
        return log


def write(work: Work) -> None:
    first = chain(3, seed=1)
    work.save(first)
    work.save(chain(2, seed=2, parent=first[1]))


def delete(work: Work) -> None:
    first = chain(4, seed=1)
    work.save(first)
    work.remove(first[2:], is_forgotten=False)
    work.save(chain(3, seed=2))


def evict(work: Work) -> None:
    work.save(chain(3, seed=1))
    work.limit(3)
    for seed in range(2, 5):
        work.save(chain(3, seed=seed))
    assert work.driver.tier.stats().num_evicted > 0


def forget(work: Work) -> None:
    first, second = chain(3, seed=1), chain(3, seed=2)
    work.save(first)
    work.save(second)
    work.remove(first, is_forgotten=True)
    work.save(chain(2, seed=3))
    work.save(first)


WORKS = [write, delete, evict, forget]


def recorded(
    work: Callable[[Work], None], directory: Path, *, is_encrypted: bool = False
) -> tuple[list[Entry], list[Block]]:
    running = Work(directory, is_encrypted=is_encrypted)
    work(running)
    return running.finish(), running.known


def check(point: CrashPoint, directory: Path, known: Sequence[Block], *, is_encrypted: bool = False) -> None:
    """A store opened on what was left. An encrypted one has lost its keys with its index."""
    files = point.restore(directory)
    forgotten_ids = [block.record.packed_ids for block in known if block.name in point.forgotten]
    for name, content in point.crash.contents.items():
        assert not any(ids in content for ids in forgotten_ids), f"forgotten ids in {name}: {point.where}"
    driver = DiskDriver(directory, files, is_encrypted=is_encrypted)
    required = point.required if point.has_index or not is_encrypted else frozenset()
    try:
        found = check_contents(driver, known, point.where)
        assert not required - found.keys(), f"what was safe is lost: {point.where}"
        assert not point.forgotten & found.keys(), f"what was forgotten came back: {point.where}"
        more = chain(2, seed=1000)
        driver.save(more)
        kept = check_contents(driver, [*known, *more], f"{point.where}; and two more stored")
        assert kept.keys() == found.keys() | {block.name for block in more}, point.where
    finally:
        driver.close()


@pytest.mark.parametrize("work", WORKS)
def test_c6_no_crash_makes_a_wrong_or_a_lost_block(work: Callable[[Work], None], quick_path: Path) -> None:
    log, known = recorded(work, quick_path / "work")
    points = list(crash_points(log, Random(1), num_drawn=2))
    for point in Random(2).sample(points, min(NUM_QUICK // len(WORKS), len(points))):
        check(point, quick_path / "crashed", known)


@pytest.mark.parametrize("work", [evict, forget])
def test_c6_no_crash_makes_a_wrong_or_a_lost_block_of_an_encrypted_store(
    work: Callable[[Work], None], quick_path: Path
) -> None:
    log, known = recorded(work, quick_path / "work", is_encrypted=True)
    points = list(crash_points(log, Random(4), num_drawn=2))
    for point in Random(5).sample(points, min(NUM_QUICK // len(WORKS), len(points))):
        check(point, quick_path / "crashed", known, is_encrypted=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("work", WORKS)
def test_c6_no_crash_makes_a_wrong_or_a_lost_block_at_every_point(
    work: Callable[[Work], None], quick_path: Path
) -> None:
    log, known = recorded(work, quick_path / "work")
    for point in crash_points(log, Random(3), num_drawn=6):
        check(point, quick_path / "crashed", known)


def _sync_without_sync(self: Slab) -> None:
    pass


def _any_payload_is_good(header: bytearray, payload: object) -> None:
    pass


def _leave_the_records(self: Slab, slots: Sequence[int]) -> None:
    pass


SEEDED_BUGS: dict[str, tuple[Callable[[Work], None], list[tuple[object, str, object]]]] = {
    "a group is committed before it is synced": (write, [(Slab, "sync", _sync_without_sync)]),
    "torn images are believed": (write, [(reader, "check_payload", _any_payload_is_good)]),
    "forgotten records stay in the file": (
        forget,
        [(Slab, "_zero_headers", _leave_the_records), (Slab, "_punch", _leave_the_records)],
    ),
}


@pytest.mark.parametrize(("work", "patches"), SEEDED_BUGS.values(), ids=SEEDED_BUGS)
def test_the_replay_catches_a_seeded_bug(
    work: Callable[[Work], None],
    patches: list[tuple[object, str, object]],
    quick_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name, bug in patches:
        monkeypatch.setattr(owner, name, bug)
    log, known = recorded(work, quick_path / "work")
    points = list(crash_points(log, Random(1), num_drawn=4))
    Random(2).shuffle(points)
    assert any(is_caught(point, quick_path / "crashed", known) for point in points)


def is_caught(point: CrashPoint, directory: Path, known: Sequence[Block]) -> bool:
    try:
        check(point, directory, known)
    except AssertionError:
        return True
    return False
