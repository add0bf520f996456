"""The store's way to the disk, in memory and with a log: every crash point of what was done can be replayed.

SQLite writes by itself, into a real directory; the log gets copies of its files at each commit.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import RLock

from volume import Change, Commit, Crash, Create, Entry, Mark, Remove, Sync, SyncNames, Volume

from chatkv.engine.store.files import Buffer

ALLOCATION_BYTES = 4096
LOST = ("absent", "garbage")
"""States of an index."""


class RecordingFile:
    """A `StoreFile` whose content lies in a volume."""

    def __init__(self, files: RecordingFiles, name: str) -> None:
        self._files, self._name = files, name

    @property
    def size(self) -> int:
        with self._files.lock:
            return len(self._content)

    @property
    def allocated_bytes(self) -> int:
        return self._files.allocated_in(self._name)

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        self._files.log_entry(Change(self._name, "write", offset, b"".join(bytes(part) for part in parts)))

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        with self._files.lock:
            num_read = 0
            for part in parts:
                view = memoryview(part).cast("B")
                piece = self._content[offset + num_read : offset + num_read + len(view)]
                view[: len(piece)] = piece
                num_read += len(piece)
            return num_read

    def datasync(self) -> None:
        self._files.log_entry(Sync(self._name))

    def punch(self, offset: int, length: int) -> None:
        self._files.log_entry(Change(self._name, "punch", offset, bytes(length)))

    def truncate(self, size: int) -> None:
        self._files.log_entry(Change(self._name, "size", size))

    def data_ranges(self) -> list[tuple[int, int]]:
        """Pages that are not all zero."""
        with self._files.lock:
            content = bytes(self._content)
        ranges: list[tuple[int, int]] = []
        for start in range(0, len(content), ALLOCATION_BYTES):
            end = min(start + ALLOCATION_BYTES, len(content))
            if content[start:end].strip(b"\0"):
                if ranges and ranges[-1][1] == start:
                    ranges[-1] = (ranges[-1][0], end)
                else:
                    ranges.append((start, end))
        return ranges

    def drop_cache(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def _content(self) -> bytearray:
        return self._files.volume.content(self._name)


class RecordingFiles:
    """A `Files` for one directory. Files that it did not open itself (SQLite's, the lock) are the real ones there."""

    def __init__(self, directory: Path, contents: Mapping[str, bytes] | None = None) -> None:
        self.directory = directory
        self.volume = Volume(contents)
        self.log: list[Entry] = []
        self.lock = RLock()

    def log_entry(self, entry: Entry) -> None:
        with self.lock:
            self.volume.apply(entry)
            self.log.append(entry)

    def open(self, path: Path) -> RecordingFile:
        name = self._name(path)
        with self.lock:
            if name not in self.volume.names:
                if not path.parent.is_dir():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
                self.log_entry(Create(name))
        return RecordingFile(self, name)

    def names(self, directory: Path) -> list[str]:
        with self.lock:
            held = [path for name in self.volume.names if (path := self.directory / name).parent == directory]
        return sorted({path.name for path in held} | set(os.listdir(directory)))

    def remove(self, path: Path) -> None:
        with self.lock:
            if (name := self._name(path)) in self.volume.names:
                self.log_entry(Remove(name))
        path.unlink(missing_ok=True)

    def sync_dir(self, directory: Path) -> None:
        self.log_entry(SyncNames())

    def allocated_bytes(self, path: Path) -> int:
        with self.lock:
            held = [name for name in self.volume.names if (self.directory / name).is_relative_to(path)]
            real = sum(self._real_bytes(file) for file in ([path, *path.rglob("*")] if path.is_dir() else [path]))
            return real + sum(self.allocated_in(name) for name in held)

    def allocated_in(self, name: str) -> int:
        with self.lock:
            return -(-len(self.volume.content(name)) // ALLOCATION_BYTES) * ALLOCATION_BYTES

    def note_commit(self, path: Path) -> None:
        files = [path, path.with_name(path.name + "-wal")]
        self.log_entry(Commit({file.name: file.read_bytes() for file in files if file.exists()}))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.directory))

    @staticmethod
    def _real_bytes(file: Path) -> int:
        try:
            return file.lstat().st_blocks * 512
        except FileNotFoundError:
            return 0


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One state in which a crash may leave the store, and what a store opened on it owes."""

    crash: Crash
    database: Mapping[str, bytes]
    required: frozenset[bytes]
    """Hashes that must be there."""
    forgotten: frozenset[bytes]
    """Hashes that must not be there, nor anything of them in a file."""
    has_index: bool
    """False: only the records are left."""
    where: str

    def restore(self, directory: Path) -> RecordingFiles:
        """The state as a new directory."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        for name, content in self.database.items():
            (directory / name).write_bytes(content)
        return RecordingFiles(directory, self.crash.contents)


def crash_points(log: Sequence[Entry], random: Random, num_drawn: int) -> Iterator[CrashPoint]:
    """Every moment between two operations x what may be left of the files x what may be left of the index."""
    volume = Volume()
    commits: list[Commit] = []
    known = Mark()
    for index, entry in enumerate(log):
        if isinstance(entry, Mark):
            known = entry
            continue
        if isinstance(entry, Commit):
            commits.append(entry)
        volume.apply(entry)
        for crash in volume.crashes(random, num_drawn):
            where = f"after entry {index} ({type(entry).__name__}); {crash.how}"
            for name, database, is_durable in _databases(commits, random):
                owed = _owed(known, log, index + 1) if is_durable else frozenset()
                has_index = name not in LOST
                yield CrashPoint(crash, database, owed, known.forgotten, has_index, f"{where}; index: {name}")
            under_way, mark = _next_operation(log, index + 1, known)
            if under_way is not None and isinstance(commit := log[under_way], Commit):
                owed = _owed(mark, log, under_way + 1)
                where += "; index: of the next commit"
                yield CrashPoint(crash, commit.database, owed, mark.forgotten, True, where)


def _owed(known: Mark, log: Sequence[Entry], start: int) -> frozenset[bytes]:
    """What was safe, and has not begun to go before the next mark."""
    following = next((entry for entry in log[start:] if isinstance(entry, Mark)), known)
    return known.alive & following.alive


def _next_operation(log: Sequence[Entry], start: int, known: Mark) -> tuple[int | None, Mark]:
    """Its place in the log, and the last mark before it."""
    for index in range(start, len(log)):
        entry = log[index]
        if not isinstance(entry, Mark):
            return index, known
        known = entry
    return None, known


def _databases(commits: Sequence[Commit], random: Random) -> Iterator[tuple[str, Mapping[str, bytes], bool]]:
    """(what it is, SQLite's files, whether all that was committed must be found with it)."""
    yield "absent", {}, True
    if commits:
        yield "as of the last commit", commits[-1].database, True
        yield "garbage", {name: random.randbytes(len(content)) for name, content in commits[-1].database.items()}, True
    if len(commits) > 1:
        yield "older", random.choice(commits[:-1]).database, False
