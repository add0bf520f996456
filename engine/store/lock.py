"""A store has one owner at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from ..errors import StoreUnavailableError
from .files import FILE_MODE


class StoreLock:
    """Held until `release`, or until this process ends; child processes do not inherit it."""

    def __init__(self, fd: int):
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> StoreLock:
        """Never waits. Raises StoreUnavailableError when another process (or store) has it, OSError."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                os.fchmod(fd, FILE_MODE)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(fd, path):
                    return cls(fd)
                os.close(fd)  # Somebody has removed the file in between: what is locked now is nobody's.
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StoreUnavailableError(
                        f"{path.parent} is in use by another chatkv. "
                        "Stop the other one, or set CHATKV_HOME to a folder of its own, and start again."
                    ) from None
                raise

    def release(self) -> None:
        if self._fd >= 0:
            # Not only closed: a child that is just being started holds the same lock until its exec is through.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
