"""A damaged database: every row that can be read goes into a new one, the old file is kept beside it.

The new file is complete and synced before the old one is touched; a crash at any point leaves one or the other.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import pages, rowcheck, schema
from .database import ChatDatabase
from .records import SalvageReport

log = logging.getLogger(__name__)

Kind = Literal["id", "text", "number", "count", "blob"]
_ID = re.compile(rb"[0-9a-f]{24}")
_SCHEMA_ROW_TYPES = (b"table", b"index", b"trigger", b"view")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    default: Any = None
    is_needed: bool = False
    """Without it the row means nothing."""


SHAPES: dict[int, tuple[str, tuple[Column, ...]]] = {
    12: (
        "chats",
        (
            Column("id", "id", is_needed=True),
            Column("title", "text", ""),
            Column("model", "text"),
            Column("settings", "text", "{}"),
            Column("draft", "text", ""),
            Column("is_pinned", "count", 0),
            Column("tip_id", "id"),
            Column("context_start_id", "id"),
            Column("forked_at_id", "id"),
            Column("created_at", "number", 0.0),
            Column("updated_at", "number", 0.0),
            Column("trashed_at", "number"),
        ),
    ),
    15: (
        "messages",
        (
            Column("seq", "count"),
            Column("id", "id", is_needed=True),
            Column("chat_id", "id", "lost"),
            Column("parent_id", "id"),
            Column("depth", "count", 1),
            Column("role", "text", "user"),
            Column("content", "text", is_needed=True),
            Column("status", "text", "stopped"),
            Column("error", "text"),
            Column("created_at", "number", 0.0),
            Column("model", "text"),
            Column("num_tokens", "count", 0),
            Column("num_path_tokens", "count", 0),
            Column("stats", "text"),
            Column("content_hash", "blob"),
        ),
    ),
    3: (
        "message_tokens",
        (
            Column("message_id", "id", is_needed=True),
            Column("tokenizer_hash", "text", is_needed=True),
            Column("ids", "blob", is_needed=True),
        ),
    ),
    5: (
        "reply_chunks",
        (
            Column("message_id", "id", is_needed=True),
            Column("position", "count", is_needed=True),
            Column("text", "text", is_needed=True),
            Column("tokenizer_hash", "text"),
            Column("ids", "blob", b""),
        ),
    ),
    7: (
        "damaged",
        (
            Column("id", "count"),
            Column("table_name", "text", is_needed=True),
            Column("row_id", "text"),
            Column("column_name", "text"),
            Column("reason", "text", ""),
            Column("raw", "blob"),
            Column("found_at", "number", 0.0),
        ),
    ),
}
"""Number of columns to table and columns, in the order in which rows hold them."""


def rebuild(
    path: Path, now: Callable[[], float], reason: str, before_swap: Callable[[], None] = lambda: None
) -> SalvageReport:
    """Replace the damaged file at `path` by a new one with all readable rows.

    Args:
        before_swap: closes the connection to the damaged file, if there is one.

    Raises:
        sqlite3.Error, OSError: the new file cannot be written; the old one is as it was.
    """
    log.error("the chat database %s is damaged (%s); copying what can be read", path, reason)
    partial = path.with_name(path.name + ".rebuilding")
    _remove(partial)
    try:
        db = ChatDatabase.on_disk(partial, now)
        try:
            schema.upgrade(db.sql)
            db.sql.execute("pragma foreign_keys = off")  # Rows come in any order, some without their parents.
            num_lost = _copy_rows(path, db)
            num_lost += rowcheck.mend(db).num_lost
            (num_chats,) = db.sql.execute("select count(*) from chats").fetchone()
            (num_messages,) = db.sql.execute("select count(*) from messages").fetchone()
            num_set_aside = db.num_set_aside
            db.checkpoint()
        finally:
            db.close()
    except BaseException:
        _remove(partial)
        raise
    _sync(partial)
    partial.replace(_rebuilt(path))
    before_swap()
    damaged_file = finish_swap(path)
    log.error("kept %d chats and %d messages; the damaged file is %s", num_chats, num_messages, damaged_file)
    return SalvageReport(reason, str(damaged_file), num_chats, num_messages, num_lost, num_set_aside)


def finish_swap(path: Path) -> Path | None:
    """Put a finished new file in the place of the damaged one, which is kept; also after a crash half way."""
    rebuilt = _rebuilt(path)
    if not rebuilt.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    kept = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            _keep(source, kept.with_name(kept.name + suffix))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    rebuilt.replace(path)
    _sync(path.parent)
    return kept


def _copy_rows(path: Path, db: ChatDatabase) -> int:
    """Returns: how many cells held no row."""
    num_lost = 0
    with db.write() as sql:
        for found in pages.read_rows(path):
            if isinstance(found, bytes):
                num_lost += 1
                db.set_aside("unknown", None, None, "unreadable cell or page", found)
            elif found.values and len(found.values) in SHAPES and found.values[0] not in _SCHEMA_ROW_TYPES:
                num_lost += not _copy_row(db, sql, found)
    return num_lost


def _copy_row(db: ChatDatabase, sql: Any, found: pages.RawRow) -> bool:
    table, columns = SHAPES[len(found.values)]
    row: dict[str, Any] = {}
    bad: list[tuple[Column, pages.Value]] = []
    for column, raw in zip(columns, found.values, strict=True):
        value, is_good = _checked(column, raw)
        if not is_good and column.is_needed and value is None:
            whole = repr(found.values).encode()
            db.set_aside(table, None, column.name, f"row without a usable {column.name}", whole)
            return False
        if not is_good:
            bad.append((column, raw))
        row[column.name] = value
    if columns[0].name in ("seq", "id") and columns[0].kind == "count":
        row[columns[0].name] = found.row_id
    for column, raw in bad:
        db.set_aside(table, str(row.get("id") or row.get("message_id")), column.name, "damaged value", raw)
    return _insert(sql, table, columns[0].name, row)


def _insert(sql: Any, table: str, key: str, row: dict[str, Any]) -> bool:
    command = f"insert into {table} ({', '.join(row)}) values ({', '.join(':' + name for name in row)})"
    try:
        sql.execute(command, row)
    except sqlite3.IntegrityError:
        if key not in ("seq", "id") or table == "chats":
            return False
        try:
            sql.execute(command, row | {key: None})  # Another row took the number; the id may still be new.
        except sqlite3.IntegrityError:
            return False
    return True


def _checked(column: Column, raw: pages.Value) -> tuple[Any, bool]:
    """The value in the column's type, and whether it is what was once written."""
    may_be_null = column.default is None and not column.is_needed
    if raw is None:
        return column.default, may_be_null
    if column.kind == "id" and isinstance(raw, bytes) and _ID.fullmatch(raw):
        return raw.decode(), True
    if column.kind == "text" and isinstance(raw, bytes):
        try:
            return raw.decode("utf-8"), True
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace"), False
    if column.kind == "number" and isinstance(raw, int | float) and math.isfinite(raw):
        return float(raw), True
    if column.kind == "count" and isinstance(raw, int) and 0 <= raw < 2**62:
        return raw, True
    if column.kind == "blob" and isinstance(raw, bytes):
        return raw, True
    return column.default, False


def _keep(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # A file system without hard links.
        shutil.copy2(source, target)
        target.chmod(0o600)


def _rebuilt(path: Path) -> Path:
    return path.with_name(path.name + ".rebuilt")


def _remove(partial: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        partial.with_name(partial.name + suffix).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
