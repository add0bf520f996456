"""The index's SQLite file: transactions whose cost in bytes is known before they are made.

One connection, exclusive, so there is no -shm file. A page goes into the WAL at most once per transaction (nothing is
spilled), transactions are small, and once the WAL has passed WAL_LIMIT_BYTES, the next one empties it first.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .files import FILE_MODE, PAGE_BYTES, Files

SCHEMA_VERSION = 1
WAL_LIMIT_BYTES = 128 * 1024
CHUNK_ROWS = 32
"""Scattered rows that one transaction may touch. Each can split its leaf: three siblings become up to five pages, and
one more holds what is too long for a leaf. With the pages above them and some counters that is at most 240 pages."""
NEIGHBOUR_BYTES = 256 * 1024
"""The same for rows that are neighbours, with all their bytes: they share leaves that are at least half full."""
CHUNK_BYTES = 128 * 1024
"""Long values that one transaction may touch, beside its rows."""


def growth_pages(num_rows: int) -> int:
    """Bound of what so many rows add to the file: each may split its leaf and have one long value."""
    return 2 * num_rows + 8


_WAL_BYTES = WAL_LIMIT_BYTES + CHUNK_BYTES + 240 * (PAGE_BYTES + 24)
_METADATA_BYTES = 64 * 1024
"""The file system's own blocks for the two files."""
INDEX_RESERVE_BYTES = _WAL_BYTES + growth_pages(CHUNK_ROWS) * PAGE_BYTES + _METADATA_BYTES
"""What the index may need before the next time that somebody looks: a full WAL, and one transaction's growth."""

_PRAGMAS = (
    f"page_size = {PAGE_BYTES}",
    "locking_mode = exclusive",
    "journal_mode = wal",
    "secure_delete = on",
    "wal_autocheckpoint = 0",
    "cache_spill = off",
    "temp_store = memory",
)

_SCHEMA = """
create table slabs(
    id integer primary key, fingerprint blob not null unique, payload_bytes integer not null, model text not null,
    content_sha256 text not null, counter integer not null, used_at real not null);
create table blocks(
    slab integer not null, slot integer not null, block_hash blob not null, parent_hash blob not null,
    position integer not null, packed_ids blob not null, extra blob not null, hits real not null, hit_at real not null,
    wrapped blob, primary key (slab, slot)) without rowid;
create table runs(
    key blob primary key, slab integer not null, block_hash blob not null, ids blob not null, used_at real not null)
    without rowid;
create index runs_by_block on runs(block_hash);
create table counters(
    name text not null, period integer not null, amount integer not null, primary key (name, period)) without rowid;
create table constants(name text primary key, value text not null) without rowid;
"""


class BrokenIndexError(Exception):
    """The index is damaged, of another schema or of another store. It is rebuilt at the next opening."""


class IndexDatabase:
    """Thread-safe: every method holds `lock`."""

    def __init__(self, path: Path, files: Files, connection: sqlite3.Connection):
        self.path = path
        self.lock = threading.RLock()
        self._files = files
        self._connection = connection

    @classmethod
    def open(cls, path: Path, files: Files, key_id: str) -> IndexDatabase:
        """Open, or create when there is no file. `key_id` names the store's key.

        Raises BrokenIndexError, OSError."""
        is_new = not path.exists()
        _make_private_file(path)
        with _translated():
            connection = _connect(path)
        database = cls(path, files, connection)
        try:
            if is_new:
                database._create(key_id)
            else:
                database._check(key_id)
        except BaseException:
            connection.close()
            raise
        return database

    def _create(self, key_id: str) -> None:
        with self.transaction(is_durable=True) as sql:
            for statement in _SCHEMA.split(";\n"):
                sql.execute(statement)
            sql.execute("insert into constants values ('key_id', ?)", [json.dumps(key_id)])
            sql.execute(f"pragma user_version = {SCHEMA_VERSION}")
        self.checkpoint()

    def _check(self, key_id: str) -> None:
        version = self.value("pragma user_version")
        if version != SCHEMA_VERSION:
            raise BrokenIndexError(f"the index has schema {version}, expected {SCHEMA_VERSION}")
        if self.value("select value from constants where name = 'key_id'") != json.dumps(key_id):
            raise BrokenIndexError("the index belongs to another store")
        if (verdict := self.value("pragma quick_check(1)")) != "ok":
            raise BrokenIndexError(f"the index is damaged: {verdict}")

    @contextmanager
    def transaction(self, *, is_durable: bool) -> Iterator[sqlite3.Connection]:
        """All or nothing. At most CHUNK_ROWS scattered rows and CHUNK_BYTES of long values.

        Args:
            is_durable: on return the change, and those before it, have survived a power cut; otherwise it survives the
                death of the process.

        Raises BrokenIndexError, OSError (ENOSPC, EIO)."""
        with self.lock, _translated():
            if self.wal_bytes > WAL_LIMIT_BYTES:
                self.checkpoint()
            sql = self._connection
            sql.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
            sql.execute("begin immediate")
            try:
                yield sql
                sql.execute("commit")
            except BaseException:
                if sql.in_transaction:  # SQLite has rolled back by itself after some errors (a full disk).
                    sql.execute("rollback")
                raise
            self._files.note_commit(self.path)

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Raises BrokenIndexError, OSError."""
        with self.lock, _translated():
            return self._connection.execute(query, parameters).fetchall()

    def value(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """The first column of the first row; None without one."""
        rows = self.rows(query, parameters)
        return rows[0][0] if rows else None

    @property
    def wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    @property
    def file_bytes(self) -> int:
        """What the file without the WAL has, or will have once the WAL was moved into it."""
        return self.value("pragma page_count") * PAGE_BYTES

    def checkpoint(self) -> None:
        """Move all of the WAL into the file and cut the WAL to nothing. Raises BrokenIndexError, OSError."""
        with self.lock, _translated():
            is_busy = self._connection.execute("pragma wal_checkpoint(truncate)").fetchone()[0]
        if is_busy:
            raise OSError(errno.EBUSY, "another connection holds the index")
        self._files.note_commit(self.path)

    def rewrite(self) -> None:
        """A new file in place of the old one, without unused pages, and without what deleted rows leave behind: for all
        its secure_delete, SQLite keeps stale copies of rows in the gaps of pages that it has rebalanced.

        For a moment there are two files. Raises BrokenIndexError, OSError: the old one stays."""
        with self.lock, _translated():
            self.checkpoint()
            fresh = self.path.with_name(self.path.name + ".new")
            try:
                fresh.unlink(missing_ok=True)
                _make_private_file(fresh)
                self._connection.execute("vacuum into ?", [str(fresh)])
                _sync(fresh)
                self._connection.close()
                try:
                    os.replace(fresh, self.path)
                finally:
                    self._connection = _connect(self.path)
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
            self._files.sync_dir(self.path.parent)
            self._files.note_commit(self.path)

    def close(self) -> None:
        with self.lock:
            self._connection.close()


def chunks(rows: Sequence[Any], size: int = CHUNK_ROWS) -> Iterable[Sequence[Any]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def slot_chunks(slots: Sequence[int], row_bytes: int) -> Iterator[Sequence[int]]:
    """`slots`, in order, in parts that one transaction may touch: many where they are dense.

    Args:
        row_bytes: of the longest row of the slab.
    """
    # A row that does not fit in a quarter of a page gets a page for its rest.
    num_neighbours = NEIGHBOUR_BYTES // (row_bytes + (PAGE_BYTES if row_bytes > PAGE_BYTES // 5 else 0))
    start = 0
    while start < len(slots):
        part = slots[start : start + max(num_neighbours, CHUNK_ROWS)]
        if part[-1] - part[0] >= 2 * len(part):
            part = slots[start : start + CHUNK_ROWS]
        yield part
        start += len(part)


def remove_index(path: Path, files: Files) -> None:
    for suffix in ("-wal", "-shm", "-journal", ""):
        files.remove(path.with_name(path.name + suffix))


@contextmanager
def _translated() -> Iterator[None]:
    """SQLite's errors as those that the rest of the store knows."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, f"the index cannot grow: {error}") from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise OSError(errno.EROFS, f"the index cannot be written: {error}") from error
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise OSError(errno.EIO, f"the index cannot be used: {error}") from error
        raise BrokenIndexError(str(error)) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"pragma {pragma}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_private_file(path: Path) -> None:
    """SQLite gives its WAL the same mode."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
    finally:
        os.close(fd)
