"""What the store knows of its records without reading them. A hint: lost, it is made again from the records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .counters import WRITTEN_BYTES, Counters
from .files import PAGE_BYTES, Files
from .index_db import (
    CHUNK_ROWS,
    BrokenIndexError,
    IndexDatabase,
    chunks,
    growth_pages,
    remove_index,
    slot_chunks,
)
from .runs import Runs

__all__ = ["BlockRow", "BrokenIndexError", "SlabRow", "StoreIndex"]

INDEX_NAME = "index.db"
_ROW_BYTES = 160
"""Of a row without `extra` and `wrapped`."""


class SlabRow(NamedTuple):
    id: int
    fingerprint: bytes
    payload_bytes: int
    model: str
    content_sha256: str
    counter: int
    """Number of the last group that was committed; the slab file has it too."""
    used_at_s: float


class BlockRow(NamedTuple):
    """A row of `blocks`, in the order of its columns."""

    slot: int
    block_hash: bytes
    parent_hash: bytes
    position: int
    packed_ids: bytes
    """Empty when `wrapped` holds them."""
    extra: bytes
    hits: float
    hit_at_s: float
    wrapped: bytes | None


class StoreIndex:
    """Thread-safe. Every method may raise BrokenIndexError and OSError (ENOSPC, EIO)."""

    def __init__(self, database: IndexDatabase, clock: Callable[[], float]):
        self.database = database
        self.counters = Counters(database, clock)
        self.runs = Runs(database, clock)
        self._clock = clock
        self._num_blocks: dict[int, int] = dict(
            database.rows("select slab, count(*) from blocks group by slab")  # type: ignore[arg-type]
        )

    @classmethod
    def open(cls, path: Path, files: Files, key_id: str, clock: Callable[[], float]) -> StoreIndex:
        return cls(IndexDatabase.open(path, files, key_id), clock)

    # Slabs

    def slabs(self) -> list[SlabRow]:
        return [
            SlabRow._make(row)
            for row in self.database.rows(
                "select id, fingerprint, payload_bytes, model, content_sha256, counter, used_at from slabs order by id"
            )
        ]

    def add_slab(
        self, fingerprint: bytes, payload_bytes: int, model: str, content_sha256: str, counter: int = 0
    ) -> SlabRow:
        now = self._clock()
        with self.database.transaction(is_durable=True) as sql:
            cursor = sql.execute(
                "insert into slabs(fingerprint, payload_bytes, model, content_sha256, counter, used_at)"
                " values (?, ?, ?, ?, ?, ?)",
                [fingerprint, payload_bytes, model, content_sha256, counter, now],
            )
            assert cursor.lastrowid is not None
            slab_id = cursor.lastrowid
        return SlabRow(slab_id, fingerprint, payload_bytes, model, content_sha256, counter, now)

    def touch_slab(self, slab_id: int, model: str) -> None:
        """It is in use now, by a model of this name."""
        with self.database.transaction(is_durable=False) as sql:
            sql.execute("update slabs set used_at = ?, model = ? where id = ?", [self._clock(), model, slab_id])

    def remove_slab(self, slab_id: int) -> None:
        """With its blocks and their runs."""
        self.runs.remove_of_slab(slab_id)
        rows = self.database.rows("select slot from blocks where slab = ? order by slot", [slab_id])
        for part in slot_chunks([slot for (slot,) in rows], self._row_bytes(slab_id)):
            with self.database.transaction(is_durable=False) as sql:
                sql.execute("delete from blocks where slab = ? and slot between ? and ?", [slab_id, part[0], part[-1]])
        with self.database.transaction(is_durable=True) as sql:
            sql.execute("delete from slabs where id = ?", [slab_id])
        self._num_blocks.pop(slab_id, None)

    # Blocks

    def num_blocks(self, slab_id: int) -> int:
        return self._num_blocks.get(slab_id, 0)

    def block_rows(self, slab_id: int) -> list[tuple[Any, ...]]:
        """Fields as in BlockRow, ordered by slot."""
        rows = self.database.rows(
            "select slot, block_hash, parent_hash, position, packed_ids, extra, hits, hit_at, wrapped"
            " from blocks where slab = ?",
            [slab_id],
        )
        self._num_blocks[slab_id] = len(rows)
        return rows

    def present(self, slab_id: int, block_hashes: Collection[bytes]) -> set[bytes]:
        """Those that have a row. Reads all rows of the slab."""
        found: set[bytes] = set()
        for part in chunks(list(block_hashes)):
            query = f"select block_hash from blocks where slab = ? and block_hash in ({','.join('?' * len(part))})"
            found.update(block_hash for (block_hash,) in self.database.rows(query, [slab_id, *part]))
        return found

    def has_row(self, slab_id: int, slot: int, block_hash: bytes) -> bool:
        query = "select 1 from blocks where slab = ? and slot = ? and block_hash = ?"
        return self.database.value(query, [slab_id, slot, block_hash]) is not None

    def add_rows(self, slab_id: int, rows: Sequence[BlockRow], counter: int, written_bytes: int) -> None:
        """Make a synced group visible. On an error no row of it stays, except where taking it back fails as well: such
        a row is true, as its record is safe, or is replaced when the slot is used again."""
        row_of = {row.slot: row for row in rows}
        row_bytes = max((len(row.extra) + len(row.wrapped or b"") for row in rows), default=0) + _ROW_BYTES
        parts = list(slot_chunks(sorted(row_of), row_bytes)) or [[]]
        done: list[int] = []
        try:
            for part in parts:
                with self.database.transaction(is_durable=part is parts[-1]) as sql:
                    sql.executemany(
                        f"insert or replace into blocks values ({slab_id}, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        [row_of[slot] for slot in part],
                    )
                    if part is parts[-1]:
                        self.counters.add(WRITTEN_BYTES, written_bytes)
                        self.counters.save_in(sql)
                        sql.execute(
                            "update slabs set counter = ?, used_at = ? where id = ?", [counter, self._clock(), slab_id]
                        )
                done.extend(part)
                self._num_blocks[slab_id] = self.num_blocks(slab_id) + len(part)
        except BaseException:
            self.remove_rows(slab_id, done, is_durable=False)
            raise

    def remove_rows(self, slab_id: int, slots: Collection[int], *, is_durable: bool) -> None:
        """And the runs that end in these blocks."""
        row_bytes = self._row_bytes(slab_id) if len(slots) > CHUNK_ROWS else _ROW_BYTES
        parts = list(slot_chunks(sorted(slots), row_bytes))
        for number, part in enumerate(parts, 1):
            marks = ",".join("?" * len(part))
            with self.database.lock:
                hashes = self.database.rows(
                    f"select block_hash from blocks where slab = ? and slot in ({marks})", [slab_id, *part]
                )
                self.runs.remove_of_blocks([block_hash for (block_hash,) in hashes])
                with self.database.transaction(is_durable=is_durable and number == len(parts)) as sql:
                    sql.execute(f"delete from blocks where slab = ? and slot in ({marks})", [slab_id, *part])
                self._num_blocks[slab_id] = self.num_blocks(slab_id) - len(hashes)

    def _row_bytes(self, slab_id: int) -> int:
        """Bound of what a row of this slab has."""
        query = "select max(length(extra) + coalesce(length(wrapped), 0)) from blocks where slab = ?"
        return (self.database.value(query, [slab_id]) or 0) + _ROW_BYTES

    def set_hits(self, slab_id: int, rows: Sequence[tuple[int, float, float]]) -> None:
        """(slot, hits, hit_at_s) each."""
        for part in chunks(sorted(rows)):
            with self.database.transaction(is_durable=False) as sql:
                sql.executemany(
                    "update blocks set hits = ?, hit_at = ? where slab = ? and slot = ?",
                    [(hits, hit_at_s, slab_id, slot) for slot, hits, hit_at_s in part],
                )

    # Constants

    def constant(self, name: str, default: Any = None) -> Any:
        value = self.database.value("select value from constants where name = ?", [name])
        return default if value is None else json.loads(value)

    def set_constant(self, name: str, value: Any, *, is_durable: bool = False) -> None:
        """`value`: what JSON can hold, at most some kilobytes."""
        with self.database.transaction(is_durable=is_durable) as sql:
            sql.execute("insert or replace into constants values (?, ?)", [name, json.dumps(value)])

    # Size

    def growth_bytes(self, num_rows: int) -> int:
        """Bound of what a group of so many rows adds to the file beyond INDEX_RESERVE_BYTES."""
        return max(0, growth_pages(num_rows) - growth_pages(CHUNK_ROWS)) * PAGE_BYTES

    def save_counters(self) -> None:
        with self.database.transaction(is_durable=False) as sql:
            self.counters.save_in(sql)

    def close(self) -> None:
        try:
            self.save_counters()
            self.runs.save_uses()
            self.database.checkpoint()
        finally:
            self.database.close()


def open_or_replace(
    path: Path, files: Files, key_id: str, clock: Callable[[], float]
) -> tuple[StoreIndex, BrokenIndexError | None]:
    """A damaged, older or foreign index gives way to an empty one; then the reason is returned too. Raises OSError."""
    try:
        return StoreIndex.open(path, files, key_id, clock), None
    except BrokenIndexError as error:
        remove_index(path, files)
        return StoreIndex.open(path, files, key_id, clock), error
