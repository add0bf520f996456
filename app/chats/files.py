"""The database on disk and the one in memory: how a store opens, runs one call after the other, mends and closes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Self, TypeVar

from . import opening, schema
from .database import ChatDatabase, is_private_id
from .errors import ChatNotFoundError, as_user_error
from .records import SalvageReport

T = TypeVar("T")


class ChatFiles:
    """The chats on disk and, beside them, the private ones, which live in memory and are gone on `close`."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time):
        """Open or create the database at `path`; old schemas are upgraded, damage is salvaged, cut replies are closed.

        Raises:
            NewerStoreError: the file was written by a newer chatkv.
            StoreFullError, StoreBusyError: it cannot be opened now.
        """
        self.file = path
        self._now = now
        self._lock = RLock()
        self._private: ChatDatabase | None = None
        self._is_closed = False
        self._was_checked = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file_lock = opening.StoreLock(path)
            try:
                opened = opening.open_store(path, now)
            except BaseException:
                self._file_lock.release()
                raise
        except (sqlite3.Error, OSError) as error:
            raise as_user_error(error, str(path)) or error from error
        self._disk = opened.db
        self.salvage_report: SalvageReport | None = opened.report
        """What was lost to damage since the store was opened; None: nothing."""
        self.num_recovered_replies = opened.num_recovered_replies
        """Replies that the last process left unfinished; now "stopped"."""

    def close(self) -> None:
        """Idempotent. The private chats are gone."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._private:
                self._private.close()
                self._private = None
            opening.close_store(self._disk)
            self._file_lock.release()

    @property
    def num_set_aside(self) -> int:
        """Rows and values, ever, that made no sense and are kept in the table `damaged`."""
        return self._run(False, lambda db: db.num_set_aside)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _on(self, row_id: str, operation: Callable[[ChatDatabase], T]) -> T:
        def checked(db: ChatDatabase) -> T:
            try:
                return operation(db)
            except ChatNotFoundError:
                # Ids of others' making are common; a whole check is not: once is enough to know.
                if not db.is_private and not self._was_checked:
                    self._was_checked = True
                    opening.check_missing(db)
                raise

        return self._run(is_private_id(row_id), checked)

    def _run(self, is_private: bool, operation: Callable[[ChatDatabase], T]) -> T:
        with self._lock:
            try:
                try:
                    return operation(self._database(is_private))
                except sqlite3.Error as error:
                    if is_private or not self._mend(error):
                        raise
                return operation(self._disk)
            except (sqlite3.Error, OSError) as error:
                raise as_user_error(error, "" if is_private else str(self.file)) or error from error

    def _database(self, is_private: bool) -> ChatDatabase:
        if not is_private:
            return self._disk
        if self._private is None:
            self._private = ChatDatabase.in_memory(self._now)
            schema.upgrade(self._private.sql)
        return self._private

    def _mend(self, error: sqlite3.Error) -> bool:
        """True when `error` came from damage that is gone now."""
        mended = opening.mend(self._disk, error)
        if mended is None:
            return False
        self._disk = mended.db
        self.salvage_report = mended.report or self.salvage_report
        return True
