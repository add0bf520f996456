"""The index: what it may cost in bytes, what it does when it breaks, and what it forgets."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from random import Random

import pytest

from chatkv.engine.store.files import OsFiles
from chatkv.engine.store.index import BlockRow, StoreIndex, open_or_replace
from chatkv.engine.store.index_db import INDEX_RESERVE_BYTES, BrokenIndexError, growth_pages
from chatkv.engine.store.runs import MAX_RUN_BYTES, MAX_RUNS_BYTES, Run

NOW_S = 1_800_000_000.0


class Watch(OsFiles):
    """Notes how large the WAL was at each commit, before it is emptied."""

    max_wal_bytes = 0

    def note_commit(self, path: Path) -> None:
        wal = path.with_name(path.name + "-wal")
        if wal.exists():
            self.max_wal_bytes = max(self.max_wal_bytes, wal.stat().st_size)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def index(folder: Path, watch: Watch) -> StoreIndex:
    return StoreIndex.open(folder / "index.db", watch, "key", lambda: NOW_S)


def add_slab(index: StoreIndex, number: int = 1) -> int:
    return index.add_slab(bytes([number]) * 32, 4096, "model", "sha").id


def make_row(random: Random, slot: int, extra_bytes: int = 0, wrapped: bytes | None = None) -> BlockRow:
    extra = random.randbytes(extra_bytes)
    return BlockRow(
        slot, random.randbytes(16), random.randbytes(16), 3, random.randbytes(64), extra, 1.0, NOW_S, wrapped
    )


def file_bytes(folder: Path) -> int:
    return sum(os.stat(path).st_size for path in folder.iterdir())


@pytest.mark.parametrize("num_slots", [300, 100_000], ids=["dense", "scattered"])
def test_d1_growth_of_file_and_wal_is_bounded(index: StoreIndex, watch: Watch, folder: Path, num_slots: int) -> None:
    """The quota counts on these figures."""
    random = Random(num_slots)
    slab = add_slab(index)
    held: set[int] = set()
    for _ in range(60):
        slots = {random.randrange(num_slots) for _ in range(random.randrange(1, 120))} - held
        rows = [make_row(random, slot, random.choice([0, 0, 24, 800, 1200, 3800])) for slot in slots]
        before = max(index.database.file_bytes, os.stat(index.database.path).st_size)
        index.add_rows(slab, rows, 1, 1)
        after = max(index.database.file_bytes, os.stat(index.database.path).st_size)
        assert after - before <= growth_pages(len(rows)) * 4096
        held |= slots
        gone = random.sample(sorted(held), random.randrange(len(held)))
        index.remove_rows(slab, gone, is_durable=False)
        held -= set(gone)
        runs = [Run(random.randbytes(16), slab, row.block_hash, random.randbytes(30_000)) for row in rows[:4]]
        index.runs.put(runs)
        index.counters.add("disk", 5)
        index.set_hits(slab, [(slot, 2.0, 3.0) for slot in held])
        index.remove_slab(add_slab(index, 2))
    index.remove_slab(slab)
    growth = growth_pages(32) * 4096
    assert 0 < watch.max_wal_bytes <= INDEX_RESERVE_BYTES - growth
    index.database.rewrite()
    assert file_bytes(folder) < 100_000


def test_rewriting_keeps_everything_else(index: StoreIndex, folder: Path) -> None:
    random = Random(1)
    slab = add_slab(index)
    rows = [make_row(random, slot) for slot in range(100)]
    index.add_rows(slab, rows, 7, 1000)
    index.set_constant("rate", 1.5)
    index.database.rewrite()
    again = StoreIndex.open(_copied(folder), OsFiles(), "key", lambda: NOW_S)
    for opened in (index, again):
        assert opened.block_rows(slab) == [tuple(row) for row in rows]
        assert opened.slabs()[0].counter == 7
        assert opened.constant("rate") == 1.5
        assert opened.counters.written_today_bytes() == 1000
    index.add_rows(slab, [make_row(random, 200)], 8, 1)
    assert index.num_blocks(slab) == 101


def _copied(folder: Path) -> Path:
    target = folder / "copy" / "index.db"
    target.parent.mkdir()
    for path in folder.glob("index.db*"):
        (target.parent / path.name).write_bytes(path.read_bytes())
    return target


def test_the_files_are_private(index: StoreIndex, folder: Path) -> None:
    add_slab(index)
    assert {path.name for path in folder.iterdir()} == {"index.db", "index.db-wal"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    index.database.rewrite()
    add_slab(index, 2)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_c6_of_a_group_that_cannot_be_committed_no_row_stays(
    index: StoreIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)
    slab = add_slab(index)
    index.add_rows(slab, [make_row(random, slot) for slot in range(10)], 1, 1)
    real, calls = index.counters.save_in, []

    def fail_once(sql: sqlite3.Connection) -> None:
        calls.append(sql)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "full")
        real(sql)

    monkeypatch.setattr(index.counters, "save_in", fail_once)
    scattered = [make_row(random, slot) for slot in random.sample(range(100, 100_000), 90)]
    with pytest.raises(OSError, match="full"):
        index.add_rows(slab, scattered, 2, 1)
    assert len(index.block_rows(slab)) == index.num_blocks(slab) == 10
    assert index.slabs()[0].counter == 1


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (sqlite3.SQLITE_FULL, errno.ENOSPC),
        (sqlite3.SQLITE_IOERR, errno.EIO),
        (sqlite3.SQLITE_READONLY, errno.EROFS),
        (sqlite3.SQLITE_CORRUPT, None),
        (sqlite3.SQLITE_NOTADB, None),
    ],
)
def test_failures_of_sqlite_are_those_of_the_disk(
    index: StoreIndex, monkeypatch: pytest.MonkeyPatch, code: int, number: int | None
) -> None:
    def fail(sql: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("it fails")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(index.counters, "save_in", fail)
    with pytest.raises(BrokenIndexError if number is None else OSError) as caught:
        index.save_counters()
    assert getattr(caught.value, "errno", None) == number


@pytest.mark.parametrize("key_id", ["key", "another key"])
def test_an_index_of_another_store_gives_way(index: StoreIndex, folder: Path, key_id: str) -> None:
    index.set_constant("x", 1)
    index.close()
    opened, reason = open_or_replace(folder / "index.db", OsFiles(), key_id, lambda: NOW_S)
    assert (reason is None) == (key_id == "key")
    assert opened.constant("x") == (1 if key_id == "key" else None)


def test_the_index_is_for_one_connection(index: StoreIndex, folder: Path) -> None:
    with pytest.raises(OSError, match="locked"):
        StoreIndex.open(folder / "index.db", OsFiles(), "key", lambda: NOW_S)


# Runs


def test_runs_die_with_their_block(index: StoreIndex) -> None:
    random = Random(1)
    slab = add_slab(index)
    rows = [make_row(random, slot) for slot in range(3)]
    index.add_rows(slab, rows, 1, 1)
    index.runs.put([Run(bytes([number]) * 16, slab, row.block_hash, b"ids" * 4) for number, row in enumerate(rows)])
    index.remove_rows(slab, [1], is_durable=True)
    assert [index.runs.find(bytes([number]) * 16) for number in range(3)] == [b"ids" * 4, None, b"ids" * 4]
    index.remove_slab(slab)
    assert index.runs.all() == []


def test_runs_are_bounded_and_the_longest_unused_go_first(folder: Path) -> None:
    now_s = [NOW_S]
    index = StoreIndex.open(folder / "index.db", OsFiles(), "key", lambda: now_s[0])
    slab = add_slab(index)
    size = MAX_RUN_BYTES
    for number in range(MAX_RUNS_BYTES // size + 10):
        now_s[0] += 1
        index.runs.put([Run(number.to_bytes(16), slab, b"b" * 16, bytes(size))])
        assert index.runs.find((3).to_bytes(16)) is not None or number < 3
    kept = [int.from_bytes(key) for key, _ in index.runs.all()]
    assert sum(len(ids) for _, ids in index.runs.all()) <= MAX_RUNS_BYTES
    assert len(kept) > MAX_RUNS_BYTES // size // 4
    assert kept[-1] == MAX_RUNS_BYTES // size + 9
    assert 3 in kept, "it was in use all the time"
    assert not {0, 1, 2, 4, 5} & set(kept)
    index.runs.put([Run(b"long" * 4, slab, b"b" * 16, bytes(size + 1))])
    assert index.runs.find(b"long" * 4) is None


# Counters


def test_counters_are_kept_by_day_and_hour(folder: Path) -> None:
    now_s = [NOW_S]
    index = StoreIndex.open(folder / "index.db", OsFiles(), "key", lambda: now_s[0])
    slab = add_slab(index)
    index.add_rows(slab, [make_row(Random(1), 0)], 1, written_bytes=100)
    index.counters.add("disk", 10)
    index.counters.add("disk", 5)
    index.counters.add("computed", 7)
    assert index.counters.tokens_24h() == {"disk": 15, "computed": 7}
    now_s[0] += 23 * 3600
    index.counters.add("disk", 1)
    assert index.counters.tokens_24h() == {"disk": 16, "computed": 7}
    index.close()
    index = StoreIndex.open(folder / "index.db", OsFiles(), "key", lambda: now_s[0])
    assert index.counters.tokens_24h() == {"disk": 16, "computed": 7}
    now_s[0] += 2 * 3600
    assert index.counters.tokens_24h() == {"disk": 1}
    assert index.counters.written_today_bytes() == 0


def test_a_clock_that_is_set_back_harms_no_counter(folder: Path) -> None:
    now_s = [NOW_S]
    index = StoreIndex.open(folder / "index.db", OsFiles(), "key", lambda: now_s[0])
    for _ in range(3):
        index.counters.add("disk", 10)
        index.counters.add("written_bytes", 10)
        index.save_counters()
        assert index.counters.tokens_24h() == {"disk": 10}
        assert index.counters.written_today_bytes() == 10
        now_s[0] -= 400 * 24 * 3600
        assert index.counters.tokens_24h() == {}
    assert index.database.value("select count(*) from counters") == 2, "what lies in the future is dropped"
