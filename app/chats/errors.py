"""What can go wrong with the chat store, in words for people."""

from __future__ import annotations

import errno
import sqlite3

from ..errors import UserError


class ChatNotFoundError(UserError):
    """No chat or message has this id."""


class ChatStateError(UserError):
    """The chat or message exists, but this cannot be done with it as it is now."""


class DamagedError(sqlite3.DatabaseError):
    """The database contradicts itself, though SQLite reports nothing. Not for people: the store mends it."""


class ImportRefusedError(UserError):
    """A file is not an exported chat."""


class NewerStoreError(UserError):
    """The database was written by a newer chatkv; nothing was touched."""


class StoreBusyError(UserError):
    """Another process holds the database."""


class StoreFullError(UserError):
    """Nothing could be written: no space, a read-only disk, or a disk that reports errors. Nothing is half written."""


_HINT_READABLE = "Your chats are unharmed and can still be read."
_WRITE_FAILURES = {
    sqlite3.SQLITE_FULL: ("There is no space left for the chats", "Free some disk space, then try again."),
    sqlite3.SQLITE_READONLY: ("The chats cannot be changed: the disk or the file is read-only", "Make it writable."),
    sqlite3.SQLITE_PERM: ("The chats cannot be changed: access is denied", "Check who owns the folder."),
    sqlite3.SQLITE_CANTOPEN: ("The chat database cannot be opened", "Check the disk's space and the folder's rights."),
    sqlite3.SQLITE_IOERR: ("The disk reports an error for the chats", "Check its free space and its health."),
}
_ERRNO_FAILURES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EDQUOT: sqlite3.SQLITE_FULL,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EACCES: sqlite3.SQLITE_PERM,
    errno.EPERM: sqlite3.SQLITE_PERM,
    errno.EIO: sqlite3.SQLITE_IOERR,
}


def primary_code(error: BaseException) -> int:
    """SQLite's primary result code of `error`; 0 when it carries none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_corruption(error: BaseException) -> bool:
    return primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def as_user_error(error: BaseException, place: str = "") -> UserError | None:
    """The error that a person can act on; None when `error` is a fault of the program."""
    if isinstance(error, OSError):
        code = _ERRNO_FAILURES.get(error.errno or 0, 0)
    else:
        code = primary_code(error)
    if code in _WRITE_FAILURES:
        message, hint = _WRITE_FAILURES[code]
        return StoreFullError(f"{message}{f' ({place})' if place else ''}.", f"{hint} {_HINT_READABLE}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusyError(
            f"The chat database is in use by another process{f' ({place})' if place else ''}.",
            "Close the other program that has it open, then try again.",
        )
    return None
