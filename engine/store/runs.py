"""How answers were sampled: names of runs and their ids. A run is kept as long as the block in which it ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .index_db import CHUNK_BYTES, CHUNK_ROWS, IndexDatabase, chunks

MAX_RUNS_BYTES = 6 << 20
"""Sum of the ids kept; the longest unused go first."""
MAX_RUN_BYTES = CHUNK_BYTES
"""One answer's ids: 32,768 tokens. Longer ones are not kept."""


class Run(NamedTuple):
    key: bytes
    slab_id: int
    block_hash: bytes
    ids: bytes
    """u32 little endian, or that encrypted."""


class Runs:
    """Thread-safe by the lock of the database."""

    def __init__(self, database: IndexDatabase, clock: Callable[[], float]):
        self._database = database
        self._clock = clock
        self._found: set[bytes] = set()
        """Used since this was last written down."""
        self._total_bytes: int = database.value("select coalesce(sum(length(ids)), 0) from runs")

    def put(self, runs: Sequence[Run]) -> None:
        """Their blocks are in the index. Those longer than MAX_RUN_BYTES are left out."""
        now = self._clock()
        for run in runs:
            if len(run.ids) > MAX_RUN_BYTES:
                continue
            with self._database.lock:
                self._remove([run.key])
                self._make_room(len(run.ids))
                with self._database.transaction(is_durable=False) as sql:
                    sql.execute("insert into runs values (?, ?, ?, ?, ?)", [*run, now])
                self._total_bytes += len(run.ids)

    def find(self, key: bytes) -> bytes | None:
        ids = self._database.value("select ids from runs where key = ?", [key])
        if ids is not None:
            with self._database.lock:
                self._found.add(key)
        return ids

    def all(self) -> list[tuple[bytes, bytes]]:
        """(key, ids), the last used last."""
        return self._database.rows("select key, ids from runs order by used_at")  # type: ignore[return-value]

    def save_uses(self) -> None:
        with self._database.lock:
            for part in chunks(sorted(self._found)):
                marks = ",".join("?" * len(part))
                with self._database.transaction(is_durable=False) as sql:
                    sql.execute(f"update runs set used_at = ? where key in ({marks})", [self._clock(), *part])
            self._found.clear()

    def remove_of_blocks(self, block_hashes: Sequence[bytes]) -> None:
        for part in chunks(block_hashes):
            marks = ",".join("?" * len(part))
            keys = self._database.rows(f"select key from runs where block_hash in ({marks})", part)
            self._remove([key for (key,) in keys])

    def remove_of_slab(self, slab_id: int) -> None:
        self._remove([key for (key,) in self._database.rows("select key from runs where slab = ?", [slab_id])])

    def _make_room(self, num_bytes: int) -> None:
        if self._total_bytes + num_bytes > MAX_RUNS_BYTES:
            self.save_uses()
        while self._total_bytes + num_bytes > MAX_RUNS_BYTES:
            oldest = self._database.rows("select key from runs order by used_at limit ?", [CHUNK_ROWS])
            self._remove([key for (key,) in oldest])

    def _remove(self, keys: Sequence[bytes]) -> None:
        """In transactions that stay small: deleting overwrites long values with zeros."""
        pending: list[bytes] = []
        num_bytes = 0
        for key in keys:
            length = self._database.value("select length(ids) from runs where key = ?", [key])
            if length is None:
                continue
            if pending and (num_bytes + length > CHUNK_BYTES or len(pending) == CHUNK_ROWS):
                self._delete(pending, num_bytes)
                pending, num_bytes = [], 0
            pending.append(key)
            num_bytes += length
        if pending:
            self._delete(pending, num_bytes)

    def _delete(self, keys: Sequence[bytes], num_bytes: int) -> None:
        with self._database.transaction(is_durable=False) as sql:
            _delete_runs(sql, keys)
        self._total_bytes -= num_bytes


def _delete_runs(sql: sqlite3.Connection, keys: Sequence[bytes]) -> None:
    sql.execute(f"delete from runs where key in ({','.join('?' * len(keys))})", keys)
