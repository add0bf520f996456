"""The order of writes and deletes, and what is left when one of them fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from store_blocks import (
    SLOT_BYTES,
    SlabBench,
    all_bytes,
    chain,
    names,
    read,
    reopened,
)

from chatkv.engine.store.files import Buffer, OsFile, OsFiles, StoreFile
from chatkv.engine.store.record import BadRecordError


class Log(OsFiles):
    """Notes operations, and fails where it is told to."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.fails: Callable[[str], bool] = lambda operation: False
        self.errno = errno.EIO

    def note(self, operation: str) -> None:
        if self.fails(operation):
            raise OSError(self.errno, "broken")
        self.operations.append(operation)

    def open(self, path: Path) -> StoreFile:
        inner = super().open(path)
        assert isinstance(inner, OsFile)
        return LoggedFile(inner, self)

    def note_commit(self, path: Path) -> None:
        self.operations.append("commit")


class LoggedFile(OsFile):
    def __init__(self, inner: OsFile, log: Log) -> None:
        super().__init__(inner._fd)
        self._log = log

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        self._log.note(f"write {num_bytes}")
        super().pwrite(parts, offset)

    def datasync(self) -> None:
        self._log.note("sync")
        super().datasync()

    def punch(self, offset: int, length: int) -> None:
        self._log.note("punch")
        super().punch(offset, length)


@pytest.fixture
def logged(folder: Path) -> tuple[SlabBench, Log]:
    log = Log()
    return SlabBench(folder, files=log), log


def test_records_are_synced_before_their_rows_and_rows_gone_before_their_records(
    logged: tuple[SlabBench, Log],
) -> None:
    bench, log = logged
    log.operations.clear()
    slots = bench.save(chain(3))
    assert log.operations == [f"write {SLOT_BYTES}"] * 3 + ["write 4096", "sync", "commit"]
    log.operations.clear()
    bench.slab.erase(slots[:2])
    assert log.operations == ["commit", "write 4096", "write 4096", "sync"]
    log.operations.clear()
    bench.slab.erase(slots[2:], is_punched=True)
    assert log.operations == ["commit", "write 4096", "sync", "punch", "sync"]


@pytest.mark.parametrize("broken", ["write 4096", "sync", "punch"])
def test_a_delete_that_fails_is_finished_by_the_next(logged: tuple[SlabBench, Log], broken: str) -> None:
    bench, log = logged
    kept, gone = chain(2, seed=1), chain(2, seed=2)
    slots = bench.save([*kept, *gone])
    log.fails = lambda operation: operation == broken
    with pytest.raises(OSError, match="broken"):
        bench.slab.erase(slots[2:], is_forgotten=True)
    assert bench.slab.take_slot() == 4, "what is not erased is not free"
    bench.slab.give_back(4)
    log.fails = lambda operation: False
    bench.slab.erase((), is_forgotten=True)
    assert bench.slab.num_slots == 2
    assert gone[0].image[:64] not in all_bytes(bench.path.parent)
    assert [read(bench.slab, slot) for slot in slots[:2]] == kept


@pytest.mark.parametrize("broken", ["write 4096", "sync", "punch"])
def test_a_delete_that_a_crash_cut_short_is_finished_at_the_next_opening(
    logged: tuple[SlabBench, Log], broken: str
) -> None:
    bench, log = logged
    kept, gone = chain(2, seed=1), chain(2, seed=2)
    slots = bench.save([*gone, *kept])
    log.fails = lambda operation: operation == broken
    with pytest.raises(OSError, match="broken"):
        bench.slab.erase(slots[:2], is_forgotten=True)
    again = reopened(bench)
    assert again.copies.keys() == names(kept)
    assert again.slab.num_free == 2
    left = all_bytes(bench.path.parent)
    assert not any(block.record.packed_ids in left for block in gone)


def test_c6_a_failed_write_leaves_nothing_behind(logged: tuple[SlabBench, Log]) -> None:
    bench, log = logged
    [block] = chain(1)
    log.fails = lambda operation: operation == "sync"
    slot = bench.slab.take_slot()
    bench.slab.write(slot, block.record, memoryview(block.image))
    with pytest.raises(OSError, match="broken"):
        bench.slab.sync()
    bench.slab.give_back(slot)
    assert not reopened(bench).copies


def test_a_full_disk_that_refuses_the_rows_still_gets_its_room_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = SlabBench(folder)
    kept, gone = chain(2, seed=1), chain(2, seed=2)
    slots = bench.save([*gone, *kept])
    before = bench.slab.allocated_bytes

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(bench.index, "remove_rows", fail)
        with pytest.raises(OSError, match="full"):
            bench.slab.erase(slots[:2], is_punched=True)
    assert bench.slab.allocated_bytes <= before - 2 * SLOT_BYTES
    assert bench.slab.take_slot() == 4, "their rows are still there"
    with pytest.raises(BadRecordError):
        read(bench.slab, slots[0], gone[0].record)
    bench.slab.erase(())
    assert bench.slab.take_slot() == 0
    assert bench.index.num_blocks(bench.slab.id) == 2


def test_a_disk_without_room_for_zeros_gets_holes(logged: tuple[SlabBench, Log]) -> None:
    bench, log = logged
    blocks = chain(3)
    slots = bench.save(blocks)
    log.errno = errno.ENOSPC
    log.fails = lambda operation: operation.startswith("write")
    bench.slab.erase(slots[1:])
    left = all_bytes(bench.path.parent)
    assert blocks[0].image in left
    assert all(block.image[:64] not in left for block in blocks[1:])


def test_a_delete_that_is_tried_again_allocates_nothing_in_its_holes(
    logged: tuple[SlabBench, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, log = logged
    slots = bench.save(chain(3))

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "the index cannot grow")

    with monkeypatch.context() as patch:
        patch.setattr(bench.index, "remove_rows", fail)
        with pytest.raises(OSError, match="grow"):
            bench.slab.erase(slots[1:], is_punched=True)
    log.operations.clear()
    bench.slab.erase((), is_punched=True)
    assert "write 4096" not in log.operations
    assert bench.slab.num_slots == 1
