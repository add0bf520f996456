"""Runs whose block may not be in the index yet: nothing of an answer is written before the block that it ends in."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_PENDING = 256


class PendingRun(NamedTuple):
    key: bytes
    fingerprint: bytes
    block_hash: bytes
    ids: bytes


class PendingRuns:
    """Thread-safe. In memory only; the oldest go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[bytes, PendingRun] = OrderedDict()

    def put(self, runs: Sequence[PendingRun]) -> None:
        with self._lock:
            for run in runs:
                self._runs[run.key] = run
                self._runs.move_to_end(run.key)
            while len(self._runs) > MAX_PENDING:
                self._runs.popitem(last=False)

    def of(self, fingerprint: bytes) -> list[PendingRun]:
        with self._lock:
            return [run for run in self._runs.values() if run.fingerprint == fingerprint]

    def drop(self, runs: Sequence[PendingRun]) -> None:
        with self._lock:
            for run in runs:
                if self._runs.get(run.key) is run:
                    del self._runs[run.key]

    def clear(self) -> None:
        with self._lock:
            self._runs.clear()

    def __bool__(self) -> bool:
        return bool(self._runs)
