"""The store's way to the disk. Tests put a recording layer in its place and replay every crash point through it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

FILE_MODE = 0o600
PAGE_BYTES = 4096
MAX_PARTS = 1024
"""That one call of the system takes (IOV_MAX)."""

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_ZEROS = bytes(1 << 20)

Buffer = bytes | bytearray | memoryview


class StoreFile(Protocol):
    """One open file. Every method may raise OSError; all may be called from any thread."""

    @property
    def size(self) -> int:
        """Bytes, holes included."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """What the file system has given it."""
        ...

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """All of `parts`, one after the other."""
        ...

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill `parts`; the number of bytes read is smaller only at the end of the file."""
        ...

    def datasync(self) -> None: ...

    def punch(self, offset: int, length: int) -> None:
        """The range reads as zeros afterwards, and is given back where the file system can do that."""
        ...

    def truncate(self, size: int) -> None: ...

    def data_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of what is no hole, in order."""
        ...

    def drop_cache(self) -> None:
        """Forget clean cached pages, so that the next read comes from the disk."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """A directory's operations. Every method may raise OSError."""

    def open(self, path: Path) -> StoreFile:
        """For reading and writing; created when missing. 0600, closed in child processes."""
        ...

    def names(self, directory: Path) -> list[str]: ...

    def remove(self, path: Path) -> None:
        """A missing file is fine."""
        ...

    def sync_dir(self, directory: Path) -> None: ...

    def allocated_bytes(self, path: Path) -> int:
        """Of a file, or of a directory with all that is in it."""
        ...

    def note_commit(self, path: Path) -> None:
        """SQLite, which writes by itself, has just made a transaction in `path` durable."""
        ...


class OsFiles:
    """The real thing."""

    def open(self, path: Path) -> StoreFile:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        return OsFile(fd)

    def names(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_dir(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def allocated_bytes(self, path: Path) -> int:
        try:
            status = os.lstat(path)
        except FileNotFoundError:  # SQLite removes its -wal when it closes.
            return 0
        total = status.st_blocks * 512
        if not os.path.isdir(path) or os.path.islink(path):
            return total
        with os.scandir(path) as entries:
            return total + sum(self._entry_bytes(entry) for entry in entries)

    def _entry_bytes(self, entry: os.DirEntry[str]) -> int:
        if entry.is_dir(follow_symlinks=False):
            return self.allocated_bytes(Path(entry.path))
        try:
            return entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            return 0

    def note_commit(self, path: Path) -> None:
        pass


class OsFile:
    """A file descriptor."""

    def __init__(self, fd: int):
        self._fd = fd
        self._can_punch = True
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, FILE_MODE)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            num_written = os.pwritev(self._fd, left[:MAX_PARTS], offset)
            if num_written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += num_written
            left = _after(left, num_written)

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        left = [memoryview(part).cast("B") for part in parts]
        num_read = 0
        while left:
            count = os.preadv(self._fd, left[:MAX_PARTS], offset + num_read)
            if count == 0:
                break
            num_read += count
            left = _after(left, count)
        return num_read

    def datasync(self) -> None:
        os.fdatasync(self._fd)

    def punch(self, offset: int, length: int) -> None:
        if self._can_punch:
            try:
                _fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, length)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                self._can_punch = False
        end = min(offset + length, self.size)
        while offset < end:
            num_bytes = min(end - offset, len(_ZEROS))
            self.pwrite([memoryview(_ZEROS)[:num_bytes]], offset)
            offset += num_bytes

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def data_ranges(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        position, size = 0, self.size
        while position < size:
            try:
                start = os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # Only a hole is left.
                    break
                if error.errno == errno.EINVAL:  # A file system that does not know of holes.
                    return [*ranges, (position, size)]
                raise
            position = os.lseek(self._fd, start, os.SEEK_HOLE)
            ranges.append((start, position))
        return ranges

    def drop_cache(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `parts` behind their first `num_bytes`."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if num_bytes else parts


_libc = ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2), which Python's `os` lacks."""
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while call(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
