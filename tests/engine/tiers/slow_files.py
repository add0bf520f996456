"""The real files, with errors and gates."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tier_blocks import WAIT_S

from chatkv.engine.store.files import Buffer, OsFiles, StoreFile


class SlowFiles(OsFiles):
    """`errors`: operation -> errno while it stands there. `gates`: operation -> event that it waits for."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.gates: dict[str, threading.Event] = {}
        self.waiting: list[str] = []
        """Operations that have come to a gate."""
        self.num_written_bytes = 0

    def open(self, path: Path) -> StoreFile:
        return _SlowFile(self, super().open(path))

    def pass_gate(self, operation: str) -> None:
        if (gate := self.gates.get(operation)) is not None:
            self.waiting.append(operation)
            assert gate.wait(WAIT_S)
        if (number := self.errors.get(operation)) is not None:
            raise OSError(number, os.strerror(number))

    def hold(self, operation: str) -> threading.Event:
        return self.gates.setdefault(operation, threading.Event())

    def release_all(self) -> None:
        for gate in self.gates.values():
            gate.set()


class _SlowFile:
    def __init__(self, files: SlowFiles, file: StoreFile) -> None:
        self._files, self._file = files, file

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def allocated_bytes(self) -> int:
        return self._file.allocated_bytes

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        self._files.pass_gate("write")
        self._file.pwrite(parts, offset)
        self._files.num_written_bytes += sum(memoryview(part).nbytes for part in parts)

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        self._files.pass_gate("read")
        return self._file.pread_into(parts, offset)

    def datasync(self) -> None:
        self._files.pass_gate("sync")
        self._file.datasync()

    def punch(self, offset: int, length: int) -> None:
        self._file.punch(offset, length)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def data_ranges(self) -> list[tuple[int, int]]:
        return self._file.data_ranges()

    def drop_cache(self) -> None:
        self._file.drop_cache()

    def close(self) -> None:
        self._file.close()
