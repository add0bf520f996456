"""One open chat database: its connection, its transactions, and where its odd rows go."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from .errors import is_corruption
from .pages import PAGE_SIZE

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
_HAS_TRACES = "has_traces"
"""Key in `meta`: deleted rows may have left copies in the file."""
_PRIVATE_PREFIX = "p"
"""First letter of every id in the database in memory: an id says by itself where it lives (the others are hex)."""

_PRAGMAS = """
pragma foreign_keys = on;
pragma secure_delete = on;
pragma temp_store = memory;
pragma journal_size_limit = 16777216;
"""


class ChatDatabase:
    """A connection for one thread at a time. `path` None: in memory, never on disk."""

    def __init__(self, path: Path | None, now: Callable[[], float], connection: sqlite3.Connection):
        self.path = path
        self.now = now
        self.sql = Database(connection, execute_plugins=False)

    @classmethod
    def in_memory(cls, now: Callable[[], float]) -> ChatDatabase:
        return cls(None, now, _configured(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)))

    @classmethod
    def on_disk(cls, path: Path, now: Callable[[], float], is_alone: bool = False) -> ChatDatabase:
        """Open or create the file, 0600; SQLite gives its -wal and -shm the same mode.

        Args:
            is_alone: do without the -shm file, which shuts other connections out.

        Raises:
            sqlite3.Error: it cannot be opened or is no database.
        """
        _make_private_file(path)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _configured(connection)
            if is_alone:
                connection.execute("pragma locking_mode = exclusive").fetchone()
            connection.execute(f"pragma page_size = {PAGE_SIZE}")  # Heeded only by a new file.
            connection.execute("pragma journal_mode = wal").fetchone()
        except BaseException:
            connection.close()
            raise
        return cls(path, now, connection)

    @property
    def is_private(self) -> bool:
        return self.path is None

    def new_id(self) -> str:
        return (_PRIVATE_PREFIX if self.is_private else "") + secrets.token_hex(12)

    def rows(self, query: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[dict[str, Any]]:
        return list(self.each(query, parameters))

    def each(self, query: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> Iterator[dict[str, Any]]:
        """Rows as they are read. Not by `Database.query`: its savepoint stays open when damage ends the reading."""
        cursor = self.sql.execute(query, parameters)
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield dict(zip(names, row, strict=True))

    def row(self, query: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> dict[str, Any] | None:
        return next(iter(self.rows(query, parameters)), None)

    @contextmanager
    def write(self, is_durable: bool = False) -> Iterator[Database]:
        """One transaction: all or nothing.

        Args:
            is_durable: on return the change has survived a power cut (synchronous = FULL); otherwise it survives the
                death of the process, and the next durable commit carries it along.
        """
        self.sql.execute(f"pragma synchronous = {'full' if is_durable else 'normal'}")
        self.sql.execute("begin immediate")
        try:
            yield self.sql
            self.sql.execute("commit")
        except BaseException:
            # SQLite has rolled back by itself after some errors (a full disk).
            if self.sql.conn.in_transaction:
                self.sql.execute("rollback")
            raise

    def set_aside(self, table: str, row_id: str | None, column: str | None, reason: str, raw: object) -> None:
        """Keep what a row held before it is mended or dropped. Call inside `write`."""
        if isinstance(raw, str):
            raw = raw.encode("utf-8", "surrogatepass")
        elif raw is not None and not isinstance(raw, bytes):
            raw = repr(raw).encode()
        self.sql.execute(
            "insert into damaged(table_name, row_id, column_name, reason, raw, found_at) values (?, ?, ?, ?, ?, ?)",
            [table, row_id, column, reason, raw, self.now()],
        )

    def note_bad_value(self, table: str, row_id: str, column: str, reason: str, raw: object, mended: object) -> None:
        """Set a single value aside and put `mended` in its place; reading goes on even where that cannot be written."""
        try:
            with nullcontext(self.sql) if self.sql.conn.in_transaction else self.write() as sql:
                self.set_aside(table, row_id, column, reason, raw)
                sql.execute(f"update {table} set {column} = ? where id = ?", [mended, row_id])
        except sqlite3.OperationalError as error:
            if is_corruption(error):
                raise
            log.warning("could not set aside %s.%s of %s: %s", table, column, row_id, error)

    @property
    def num_set_aside(self) -> int:
        return self.sql.execute("select count(*) from damaged").fetchone()[0]

    def checkpoint(self) -> None:
        """Move everything from the -wal file into the database and empty it."""
        if not self.is_private:
            self.sql.execute("pragma wal_checkpoint(truncate)").fetchall()

    def note_traces(self) -> None:
        """The file is to be written anew after this transaction, however late that succeeds. Call inside `write`."""
        if not self.is_private:
            self.sql.execute("insert or replace into meta(key, value) values (?, '1')", [_HAS_TRACES])

    @property
    def has_traces(self) -> bool:
        return self.row("select 1 from meta where key = ?", [_HAS_TRACES]) is not None

    def write_anew(self) -> None:
        """Leave in the file what the rows hold now, and nothing else. For all its secure_delete, SQLite keeps stale
        copies of rows in the gaps of pages that it has rebalanced. No effect without `note_traces`."""
        if self.has_traces:
            self.sql.execute("vacuum")
            with self.write():
                self.sql.execute("delete from meta where key = ?", [_HAS_TRACES])
            self.checkpoint()

    def close(self) -> None:
        self.sql.close()


def _make_private_file(path: Path) -> None:
    """Not opened when it exists: closing a second descriptor would drop the locks of this process on the file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)


def _configured(connection: sqlite3.Connection) -> sqlite3.Connection:
    # A flipped bit in a text must not make the whole message unreadable.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.executescript(_PRAGMAS)
    return connection


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs, as some terminals paste them, are joined or replaced."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_private_id(row_id: str) -> bool:
    """Of a chat or message in the database in memory."""
    return row_id.startswith(_PRIVATE_PREFIX)
