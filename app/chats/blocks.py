"""Which cached KV blocks belong to which chat: rows that let a chat be forgotten, resumed and pinned.

All of it is a hint: losing it costs a computation. The hashes are keyed, 16 bytes each; no token id is kept here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .database import ChatDatabase
from .errors import ChatStateError
from .schema import HINTS

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class OwnedBlocks:
    """One chat's blocks under one fingerprint."""

    owned: frozenset[bytes]
    """All that it owns, other branches and earlier versions included."""
    shared: frozenset[bytes]
    """Those of them that other chats own too."""


@dataclass(frozen=True, slots=True)
class ChatChain:
    """The full blocks of a chat's last request, from the root."""

    chat_id: str
    num_tokens: int
    """Of the whole request; the last ones may fill no block."""
    hashes: tuple[bytes, ...]
    updated_at: float


def add_owners(db: ChatDatabase, fingerprint: bytes, pairs: Collection[tuple[str, bytes]]) -> None:
    """
    Raises:
        ChatStateError: one of the chats is in the trash or not there; nothing was written.
    """
    if missing := {owner for owner, _ in pairs} - _living(db, {owner for owner, _ in pairs}):
        raise ChatStateError(f"Blocks of {len(missing)} deleted chats were not taken: {', '.join(sorted(missing))}.")
    # Durable: a block that outlives a power cut without its row could not be forgotten.
    with db.write(is_durable=True) as sql:
        sql.conn.executemany(
            "insert or ignore into block_owners(chat_id, fingerprint, block_hash) values (?, ?, ?)",
            [(owner, fingerprint, block_hash) for owner, block_hash in pairs],
        )


def owned(db: ChatDatabase, chat_id: str) -> dict[bytes, OwnedBlocks]:
    """By fingerprint."""
    rows = db.rows(
        "select o.fingerprint, o.block_hash, exists ("
        "select 1 from block_owners b where b.block_hash = o.block_hash and b.chat_id != o.chat_id) as is_shared "
        "from block_owners o where o.chat_id = ?",
        [chat_id],
    )
    found: dict[bytes, tuple[set[bytes], set[bytes]]] = {}
    for row in rows:
        hashes, shared = found.setdefault(row["fingerprint"], (set(), set()))
        hashes.add(row["block_hash"])
        if row["is_shared"]:
            shared.add(row["block_hash"])
    return {name: OwnedBlocks(frozenset(hashes), frozenset(shared)) for name, (hashes, shared) in found.items()}


def owned_by_any(db: ChatDatabase, hashes: Iterable[bytes]) -> frozenset[bytes]:
    """Those of `hashes` that some chat of this database owns."""
    find = "select 1 from block_owners where block_hash = ?"
    return frozenset(value for value in hashes if db.sql.execute(find, [value]).fetchone())


def drop(db: ChatDatabase, chat_id: str) -> None:
    """Nothing of the rows stays in the file."""
    with db.write():
        if drop_rows(db, chat_id):
            _write_anew(db)
    db.checkpoint()


def drop_rows(db: ChatDatabase, chat_id: str) -> int:
    """How many there were. Call inside `write`."""
    return sum(db.sql.execute(f"delete from {table} where chat_id = ?", [chat_id]).rowcount for table in HINTS)


def clear(db: ChatDatabase) -> None:
    """Drop all rows; nothing of them stays in the file."""
    with db.write() as sql:
        for table in HINTS:
            sql.execute(f"delete from {table}")
        _write_anew(db)
    db.checkpoint()


def set_chain(db: ChatDatabase, chat_id: str, fingerprint: bytes, num_tokens: int, hashes: Sequence[bytes]) -> None:
    """Nothing is kept for a chat that was deleted meanwhile."""
    packed = b"".join(hashes)
    assert len(packed) == HASH_BYTES * len(hashes), "a block hash has another length"
    with db.write() as sql:
        if _living(db, {chat_id}):
            sql.execute(
                "insert or replace into chat_chains(chat_id, fingerprint, num_tokens, hashes, updated_at) "
                "values (?, ?, ?, ?, ?)",
                [chat_id, fingerprint, num_tokens, packed, db.now()],
            )


def chains(db: ChatDatabase, fingerprint: bytes, limit: int) -> list[ChatChain]:
    """Newest first."""
    rows = db.rows(
        "select chat_id, num_tokens, hashes, updated_at from chat_chains "
        "where fingerprint = ? and typeof(hashes) = 'blob' order by updated_at desc, chat_id limit ?",
        [fingerprint, limit],
    )
    return [ChatChain(row["chat_id"], row["num_tokens"], _unpack(row["hashes"]), row["updated_at"]) for row in rows]


def of_pinned(db: ChatDatabase, fingerprint: bytes) -> dict[str, list[bytes]]:
    """Blocks of the pinned chats, by chat; a pinned chat without any is left out."""
    found: dict[str, list[bytes]] = {}
    for row in db.rows(
        "select o.chat_id, o.block_hash from chats c join block_owners o on o.chat_id = c.id "
        "where c.is_pinned and c.trashed_at is null and o.fingerprint = ?",
        [fingerprint],
    ):
        found.setdefault(row["chat_id"], []).append(row["block_hash"])
    return found


def owners_id(db: ChatDatabase) -> str:
    """Names the life of the rows: another one, when they have been lost since."""
    find = "select value from meta where key = 'owners_id'"
    if not (row := db.row(find)):
        with db.write(is_durable=True) as sql:
            sql.execute("insert into meta(key, value) values ('owners_id', ?)", [db.new_id()])
        row = db.row(find)
        assert row is not None
    return str(row["value"])


def _write_anew(db: ChatDatabase) -> None:
    """For all its secure_delete, SQLite keeps stale copies of rows in the gaps of pages that it has rebalanced. The
    pages of a dropped table are zeroed whole. Call inside `write`."""
    for table in HINTS:
        made = db.rows("select name, type, sql from sqlite_master where tbl_name = ? and sql is not null", [table])
        for index in made:
            if index["type"] == "index":
                db.sql.execute(f"drop index {index['name']}")
        db.sql.execute(f"alter table {table} rename to old_rows")
        for part in sorted(made, key=lambda part: part["type"], reverse=True):
            db.sql.execute(part["sql"])
            if part["type"] == "table":
                db.sql.execute(f"insert into {table} select * from old_rows")
        db.sql.execute("drop table old_rows")


def _living(db: ChatDatabase, chat_ids: set[str]) -> set[str]:
    rows = db.rows(
        "select id from chats where trashed_at is null and id in (select value from json_each(?))",
        [json.dumps(sorted(chat_ids))],
    )
    return {row["id"] for row in rows}


def _unpack(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
