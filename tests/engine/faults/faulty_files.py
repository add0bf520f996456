"""The real files, with errors and delays where a test wants them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

from chatkv.engine.store.files import Buffer, OsFiles, StoreFile

Hook = Callable[[str, Path], None]
"""(operation, file). May raise OSError, and may take its time."""


def failing(operation: str, number: int) -> Hook:
    """Every such operation fails with this errno."""

    def hook(asked: str, path: Path) -> None:
        if asked == operation:
            raise OSError(number, os.strerror(number), str(path))

    return hook


class Hang:
    """Operations of one kind wait until `release`. Others go through."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._release = Event()
        self.has_begun = Event()

    def __call__(self, asked: str, path: Path) -> None:
        if asked == self._operation:
            self.has_begun.set()
            assert self._release.wait(60), "nobody released the operation"

    def release(self) -> None:
        self._release.set()


class FaultyFiles(OsFiles):
    """`hook` is asked before each operation; None: nothing goes wrong."""

    def __init__(self, hook: Hook | None = None) -> None:
        self.hook = hook

    def ask(self, operation: str, path: Path) -> None:
        if self.hook is not None:
            self.hook(operation, path)

    def open(self, path: Path) -> StoreFile:
        self.ask("open", path)
        return FaultyFile(self, path, super().open(path))

    def remove(self, path: Path) -> None:
        self.ask("remove", path)
        super().remove(path)

    def sync_dir(self, directory: Path) -> None:
        self.ask("sync_dir", directory)
        super().sync_dir(directory)


class FaultyFile:
    """A `StoreFile`. A write that fails leaves its first half behind, as a full disk does."""

    def __init__(self, files: FaultyFiles, path: Path, file: StoreFile) -> None:
        self._files, self._path, self._file = files, path, file

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def allocated_bytes(self) -> int:
        return self._file.allocated_bytes

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        try:
            self._files.ask("write", self._path)
        except OSError:
            whole = b"".join(bytes(part) for part in parts)
            self._file.pwrite([whole[: len(whole) // 2]], offset)
            raise
        self._file.pwrite(parts, offset)

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        self._files.ask("read", self._path)
        return self._file.pread_into(parts, offset)

    def datasync(self) -> None:
        self._files.ask("sync", self._path)
        self._file.datasync()

    def punch(self, offset: int, length: int) -> None:
        self._files.ask("punch", self._path)
        self._file.punch(offset, length)

    def truncate(self, size: int) -> None:
        self._files.ask("truncate", self._path)
        self._file.truncate(size)

    def data_ranges(self) -> list[tuple[int, int]]:
        return self._file.data_ranges()

    def drop_cache(self) -> None:
        self._file.drop_cache()

    def close(self) -> None:
        self._file.close()


ENOSPC, EIO, EROFS = errno.ENOSPC, errno.EIO, errno.EROFS
