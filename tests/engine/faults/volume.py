"""A disk in memory, and what a loss of power may leave of it.

The model is the weakest that a file system is allowed to be: what was not synced may be there, be missing, be torn at
any sector, and have reached the disk in any order; a name that was not synced may be missing, a removed one be back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 512
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a file's content."""

    name: str
    kind: str
    """"write", "punch" (`data` is zeros), "size" (cut or grown to `offset`)."""
    offset: int
    data: bytes = b""

    def apply(self, content: bytearray) -> None:
        if self.kind == "size":
            resize(content, self.offset)
            return
        end = self.offset + len(self.data)
        if self.kind == "write" and end > len(content):
            resize(content, end)
        end = min(end, len(content))  # punching keeps the size
        content[self.offset : end] = self.data[: max(0, end - self.offset)]

    def pieces(self, unit_bytes: int) -> list[Change]:
        """The same change in parts that end at multiples of `unit_bytes`."""
        parts = []
        start, end = self.offset, self.offset + len(self.data)
        while start < end:
            stop = min(end, (start // unit_bytes + 1) * unit_bytes)
            parts.append(Change(self.name, self.kind, start, self.data[start - self.offset : stop - self.offset]))
            start = stop
        return parts or [self]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} at {self.offset}, {len(self.data)} bytes"


@dataclass(frozen=True, slots=True)
class Sync:
    """The contents of one file are safe. Its name is not: that takes a `SyncNames`."""

    name: str


@dataclass(frozen=True, slots=True)
class Create:
    name: str


@dataclass(frozen=True, slots=True)
class Remove:
    name: str


@dataclass(frozen=True, slots=True)
class SyncNames:
    """The directory's entries are safe."""


@dataclass(frozen=True, slots=True)
class Commit:
    """SQLite has made a transaction durable; its files as they were then."""

    database: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Mark:
    """Not an operation: what the test knew at this moment."""

    alive: frozenset[bytes] = frozenset()
    """Hashes of the blocks that were STORED."""
    forgotten: frozenset[bytes] = frozenset()


Entry = Change | Sync | Create | Remove | SyncNames | Commit | Mark


@dataclass(frozen=True, slots=True)
class Crash:
    """What a loss of power left of the files."""

    contents: Mapping[str, bytes]
    how: str
    """For the message of a failing test."""


class _File:
    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.safe = bytes(content)
        self.pending: list[Change] = []


class Volume:
    """Contents as programs see them, and beside them what is safe."""

    def __init__(self, contents: Mapping[str, bytes] | None = None) -> None:
        """Everything in `contents` is safe."""
        self._files = {name: _File(content) for name, content in (contents or {}).items()}
        self._safe_files = dict(self._files)

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    def content(self, name: str) -> bytearray:
        return self._files[name].content

    def apply(self, entry: Entry) -> None:
        if isinstance(entry, Change):
            entry.apply(self._files[entry.name].content)
            self._files[entry.name].pending.append(entry)
        elif isinstance(entry, Sync):
            file = self._files[entry.name]
            file.safe, file.pending = bytes(file.content), []
        elif isinstance(entry, Create):
            self._files[entry.name] = _File()
        elif isinstance(entry, Remove):
            del self._files[entry.name]
        elif isinstance(entry, SyncNames):
            self._safe_files = dict(self._files)

    def crashes(self, random: Random, num_drawn: int) -> Iterator[Crash]:
        """What may be left when the power goes now: the plain cases first, then `num_drawn` drawn by lot."""
        now, safe = self._files, self._safe_files
        pending = [change for file in now.values() for change in file.pending]
        yield self._crash(now, pending, "everything had reached the disk")
        if now != safe:
            yield self._crash(now, [], "names had reached the disk, unsynced contents had not")
            yield self._crash(safe, pending, "contents had reached the disk, unsynced names had not")
        if not pending:
            return
        yield self._crash(safe, [], "nothing unsynced had reached the disk")
        for index in range(len(pending)) if len(pending) > 1 else ():
            yield self._crash(now, pending[:index] + pending[index + 1 :], f"lost: {pending[index]}")
            yield self._crash(now, [pending[index]], f"all that had reached the disk: {pending[index]}")
        for number in range(num_drawn):
            unit_bytes = (SECTOR_BYTES, PAGE_BYTES)[number % 2]
            share = random.choice((0.1, 0.5, 0.9))
            pieces = [piece for change in pending for piece in change.pieces(unit_bytes) if random.random() < share]
            random.shuffle(pieces)
            yield self._crash(
                random.choice((now, safe)), pieces, f"{len(pieces)} pieces of {unit_bytes} bytes, shuffled"
            )

    @staticmethod
    def _crash(files: Mapping[str, _File], changes: Sequence[Change], how: str) -> Crash:
        contents = {name: bytearray(file.safe) for name, file in files.items()}
        for change in changes:
            if change.name in contents:
                change.apply(contents[change.name])
        return Crash({name: bytes(content) for name, content in contents.items()}, how)


def resize(content: bytearray, num_bytes: int) -> None:
    if len(content) > num_bytes:
        del content[num_bytes:]
    else:
        content.extend(bytes(num_bytes - len(content)))
