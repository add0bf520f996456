"""Opening, closing and mending the file: the order in which a store comes to life."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UserError
from . import rowcheck, salvage, schema, turns
from .database import BUSY_TIMEOUT_S, ChatDatabase
from .errors import DamagedError, NewerStoreError, StoreBusyError, as_user_error, is_corruption, primary_code
from .records import SalvageReport

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Opened:
    db: ChatDatabase
    report: SalvageReport | None = None
    num_recovered_replies: int = 0


class StoreLock:
    """One process writes; it ends with the process, however that dies, and children do not inherit it."""

    def __init__(self, path: Path):
        file = path.with_name(path.name + ".lock")
        self._descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self.release()
                    raise StoreBusyError(
                        f"The chats in {path} are in use by another chatkv.",
                        "Use that one, or stop it with: chatkv stop",
                    ) from None
                time.sleep(LOCK_POLL_S)

    def release(self) -> None:
        os.close(self._descriptor)


def open_store(path: Path, now: Callable[[], float]) -> Opened:
    """Open, upgrade and check the file; what is damaged is salvaged.

    Raises:
        UserError: it cannot be had: in use, from a newer version, on a bad disk, or no file at all.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, where the file with the chats should be.", "Move it away.")
    salvage.finish_swap(path)
    try:
        return _bring_up(path, now)
    except sqlite3.DatabaseError as error:
        if as_user_error(error):
            raise
        report = salvage.rebuild(path, now, str(error))
    return replace(_bring_up(path, now), report=report)


def _bring_up(path: Path, now: Callable[[], float]) -> Opened:
    """
    Raises:
        sqlite3.DatabaseError: the file is damaged, or cannot be opened.
    """
    db = _open_sound(path, now)
    report: SalvageReport | None = None
    num_recovered = 0
    try:
        report = _check_rows(db)
        num_recovered = turns.recover_incomplete(db)
        _mark(db, is_open=True)
    except sqlite3.Error as error:
        # On a full or read-only disk the chats can still be read; each write says what is wrong.
        if not as_user_error(error):
            db.close()
            raise
        log.warning("the chat database was opened without being able to write: %s", error)
    return Opened(db, report, num_recovered)


def close_store(db: ChatDatabase) -> None:
    try:
        _mark(db, is_open=False)
        db.checkpoint()
    except sqlite3.Error as error:
        log.warning("the chat database was not closed cleanly: %s", error)
    finally:
        db.close()


def mend(db: ChatDatabase, error: sqlite3.Error) -> Opened | None:
    """After `error` in the middle of work: an opened, sound database, or None if no damage is behind the error."""
    if as_user_error(error) or not isinstance(error, sqlite3.DatabaseError):
        return None
    path = db.path
    assert path is not None
    complaint = _complaint(db)
    if complaint is None and isinstance(error, DamagedError):
        try:
            db.sql.execute("reindex")
            return Opened(db, _mend_rows(db, str(error)))
        except sqlite3.DatabaseError as worse:
            if as_user_error(worse):
                raise
            complaint = str(worse)
    if complaint is None:
        # The tables are sound: the search index is what is damaged, or nothing is.
        if not is_corruption(error):
            return None
        if _rebuild_index(db):
            return Opened(db)
    report = salvage.rebuild(path, db.now, complaint or str(error), before_swap=db.close)
    mended = _open_sound(path, db.now)
    _mark(mended, is_open=True)
    return Opened(mended, report)


def check_missing(db: ChatDatabase) -> None:
    """After a row was not found that somebody knows of: is it hidden by damage?

    Raises:
        DamagedError: the file contradicts itself.
    """
    if complaint := _complaint(db):
        raise DamagedError(complaint)
    for table in ("chats", "messages"):
        # The plus sign keeps SQLite from using the index on the left side.
        if db.row(f"select 1 from {table} a where not exists (select 1 from {table} b where b.id = +a.id)"):
            raise DamagedError(f"the index of {table} does not know all rows")


def _open_sound(path: Path, now: Callable[[], float]) -> ChatDatabase:
    """
    Raises:
        NewerStoreError: a newer program wrote it.
        sqlite3.DatabaseError: it is damaged.
    """
    if schema.is_newer_file(path):
        raise _newer(path)
    if _has_only_wal(path):
        raise DamagedError("the file is empty, but its -wal file is not")
    if _claims_to_be_read_only(path):
        raise DamagedError("the header names an unknown file format")
    try:
        db = ChatDatabase.on_disk(path, now)
    except sqlite3.OperationalError as error:
        if primary_code(error) not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN):
            raise
        # A full disk has no room for the -shm file: the chats can still be read without it.
        db = ChatDatabase.on_disk(path, now, is_alone=True)
    try:
        if schema.version_of(db.sql) > schema.VERSION:
            raise _newer(path)
        was_clean = _was_closed(db)
        if not was_clean and (complaint := _complaint(db)):
            raise DamagedError(complaint)
        schema.upgrade(db.sql, lambda version: schema.back_up(db.sql, path, version))
        schema.probe(db.sql)
    except BaseException:
        db.close()
        raise
    return db


def _newer(path: Path) -> NewerStoreError:
    return NewerStoreError(
        f"The chats in {path} were written by a newer chatkv.", "Update chatkv. Nothing was changed."
    )


def _check_rows(db: ChatDatabase) -> SalvageReport | None:
    return None if _was_closed(db) else _mend_rows(db, "single rows were damaged")


def _mend_rows(db: ChatDatabase, reason: str) -> SalvageReport | None:
    found = rowcheck.mend(db)
    if not found.num_set_aside:
        return None
    (num_chats,) = db.sql.execute("select count(*) from chats").fetchone()
    (num_messages,) = db.sql.execute("select count(*) from messages").fetchone()
    return SalvageReport(reason, None, num_chats, num_messages, found.num_lost, found.num_set_aside)


def _complaint(db: ChatDatabase) -> str | None:
    """What is wrong with the file as a whole. Reads all of it: only after an unclean stop, or after an error."""
    try:
        (first,) = db.sql.execute("pragma quick_check(1)").fetchone()
        schema.probe(db.sql)
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if first == "ok" else str(first)


def _was_closed(db: ChatDatabase) -> bool:
    if "meta" not in db.sql.table_names():
        return True
    row = db.sql.execute("select value from meta where key = 'is_open'").fetchone()
    return row is None or row[0] == "0"


def _mark(db: ChatDatabase, is_open: bool) -> None:
    with db.write(is_durable=True) as sql:
        sql.execute("insert or replace into meta(key, value) values ('is_open', ?)", [str(int(is_open))])


def _has_only_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return path.exists() and not path.stat().st_size and wal.exists() and wal.stat().st_size > 0


def _claims_to_be_read_only(path: Path) -> bool:
    """SQLite opens a file whose write version it does not know for reading only. We write 1 or 2."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        header = file.read(20)
    return header.startswith(b"SQLite format 3\0") and not {*header[18:20]} <= {1, 2}


def _rebuild_index(db: ChatDatabase) -> bool:
    try:
        with db.write() as sql:
            sql.execute("insert into messages_fts(messages_fts) values ('rebuild')")
    except sqlite3.DatabaseError:
        return False
    log.warning("the search index was damaged and has been rebuilt")
    return True
