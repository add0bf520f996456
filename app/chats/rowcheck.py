"""Rows that contradict each other: mended one by one, what they held is kept in the table `damaged`.

Run after an unclean stop and after a salvage, in one transaction. Nothing is hidden: messages without a parent become
roots, messages without a chat get a new one, text that is no UTF-8 is shown as far as it can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import turns
from .database import ChatDatabase
from .records import ChatSettings, MessageStatus, Role
from .rows import CHAT_COLUMNS, CHAT_TABLES, MESSAGE_COLUMNS, chat_from_row, dump_settings, message_from_row

_TEXT_COLUMNS = {"chats": ("title", "draft", "model"), "messages": ("content", "error", "model")}
_POINTERS = {"tip_id": "chats", "forked_at_id": "chats", "context_start_id": "chats", "parent_id": "messages"}


@dataclass(frozen=True, slots=True)
class RowCheck:
    num_set_aside: int
    num_lost: int
    """Messages that others point at and that are not there."""


def mend(db: ChatDatabase) -> RowCheck:
    before = db.num_set_aside
    with db.write():
        _drop_loose_ids(db)
        num_lost = _clear_dangling(db)
        _break_rings(db)
        _give_homes(db)
        _set_depths(db)
        _mend_texts(db)
        _mend_values(db)
        _find_tips(db)
    return RowCheck(db.num_set_aside - before, num_lost)


def _drop_loose_ids(db: ChatDatabase) -> None:
    for table in ("message_tokens", "reply_chunks"):
        db.sql.execute(f"delete from {table} where message_id not in (select id from messages)")
    bad = db.rows("select rowid, message_id, ids from message_tokens where length(ids) % 4 or typeof(ids) != 'blob'")
    for row in bad:
        db.set_aside("message_tokens", row["message_id"], "ids", "not a list of ids", row["ids"])
        db.sql.execute("delete from message_tokens where rowid = ?", [row["rowid"]])


def _clear_dangling(db: ChatDatabase) -> int:
    missing: set[str] = set()
    for column, table in _POINTERS.items():
        for row in db.rows(
            f"select id, {column} as at from {table} where {column} is not null "
            f"and {column} not in (select id from messages)"
        ):
            missing.add(str(row["at"]))
            db.set_aside(table, row["id"], column, "points at a message that is not there", row["at"])
            db.sql.execute(f"update {table} set {column} = null where id = ?", [row["id"]])
    return len(missing)


def _break_rings(db: ChatDatabase) -> None:
    """A ring of parents is unreachable from the roots: its oldest message becomes a root."""
    parents = {row["id"]: row["parent_id"] for row in db.rows("select id, parent_id from messages order by seq")}
    is_rooted: set[str] = set()
    for start in parents:
        way: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in is_rooted and at not in way:
            way[at] = None
            at = parents[at]
        if at is not None and at in way:
            ring = list(way)[list(way).index(at) :]
            oldest = next(message_id for message_id in parents if message_id in set(ring))
            db.set_aside("messages", oldest, "parent_id", "its parents form a ring", parents[oldest])
            db.sql.execute("update messages set parent_id = null where id = ?", [oldest])
            parents[oldest] = None
        is_rooted |= set(way)


def _give_homes(db: ChatDatabase) -> None:
    """A chat whose row was lost comes back under its id, named after its first message."""
    homeless = db.rows(
        "select chat_id, min(created_at) as begun, max(created_at) as ended from messages "
        "where chat_id not in (select id from chats) group by chat_id"
    )
    for row in homeless:
        first = db.row(
            "select content from messages where chat_id = ? and role = 'user' order by depth, seq", [row["chat_id"]]
        )
        title = turns.first_words(first["content"]) if first else ""
        chat_id = row["chat_id"] if row["chat_id"] != "lost" else db.new_id()
        db.sql.table("chats").insert(
            {
                "id": chat_id,
                "title": title or "Recovered chat",
                "settings": dump_settings(ChatSettings()),
                "created_at": row["begun"],
                "updated_at": row["ended"],
            }
        )
        db.sql.execute("update messages set chat_id = ? where chat_id = ?", [chat_id, row["chat_id"]])
        db.set_aside("chats", chat_id, None, "the chat's row was lost; its messages were found", None)


def _set_depths(db: ChatDatabase) -> None:
    rows = db.rows("select id, parent_id, depth from messages")
    children: dict[str | None, list[str]] = {}
    for row in rows:
        children.setdefault(row["parent_id"], []).append(row["id"])
    stored = {row["id"]: row["depth"] for row in rows}
    level, depth = children.get(None, []), 1
    while level:
        wrong = [(depth, message_id) for message_id in level if stored[message_id] != depth]
        db.sql.conn.executemany("update messages set depth = ? where id = ?", wrong)
        level = [child for message_id in level for child in children.get(message_id, [])]
        depth += 1


def _mend_texts(db: ChatDatabase) -> None:
    for table, columns in _TEXT_COLUMNS.items():
        for column in columns:
            bad: list[tuple[str, bytes]] = []
            for row_id, raw in db.sql.execute(
                f"select id, cast({column} as blob) from {table} where {column} is not null"
            ):
                try:
                    raw.decode("utf-8")
                except UnicodeDecodeError:
                    bad.append((row_id, raw))
            for row_id, raw in bad:
                db.note_bad_value(table, row_id, column, "not UTF-8", raw, raw.decode("utf-8", "replace"))


def _mend_values(db: ChatDatabase) -> None:
    for row in db.rows(f"select {CHAT_COLUMNS} from {CHAT_TABLES}"):
        chat_from_row(row, db.is_private, db.note_bad_value)
    columns = MESSAGE_COLUMNS.replace("m.content", "'' as content")
    known = ", ".join(f"'{value}'" for value in (*Role, *MessageStatus))
    for row in db.rows(
        f"select {columns} from messages m where m.stats is not null or m.role not in ({known}) "
        f"or m.status not in ({known})"
    ):
        message_from_row(row, "", db.note_bad_value)


def _find_tips(db: ChatDatabase) -> None:
    """A chat that lost its tip shows its newest branch."""
    db.sql.execute(
        "update chats set tip_id = "
        "(select m.id from messages m where m.chat_id = chats.id order by m.seq desc limit 1) where tip_id is null"
    )
