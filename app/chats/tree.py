"""The message tree: rows know their parent, a chat names a tip, forks share rows.

What a chat holds is what was written in it (`messages.chat_id`) and, when it is a fork, the way from the root to the
message it was forked at. So every version of a reply stays reachable, and forks do not show each other's branches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .database import ChatDatabase
from .errors import ChatNotFoundError, DamagedError
from .records import Message
from .rows import MESSAGE_COLUMNS, message_from_row, unpack_ids

# `union` (not `union all`) ends even where damage has bent the parents into a ring.
ANCESTORS = """
    with recursive up(id) as (
        values(:id)
        union
        select m.parent_id from up join messages m on m.id = up.id where m.parent_id is not null
    )
"""


def content_hash(parent_hash: bytes | None, role: str, content: str) -> bytes:
    """BLAKE2b-128 over the parent's hash, the role and the text: equal for equal conversations. An index, no id."""
    digest = blake2b(parent_hash or b"", digest_size=16)
    for part in (role.encode(), content.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def path(db: ChatDatabase, chat_id: str, tip_id: str | None, tokenizer_hash: str | None = None) -> list[Message]:
    """Root to tip; empty without a tip.

    Raises:
        ChatNotFoundError: there is no such tip.
        DamagedError: a message on the way is missing.
    """
    if tip_id is None:
        return []
    rows = db.rows(f"{ANCESTORS} select {MESSAGE_COLUMNS} from up join messages m on m.id = up.id", {"id": tip_id})
    by_id = {row["id"]: row for row in rows}
    ordered: list[dict[str, Any]] = []
    at: str | None = tip_id
    while at is not None and (row := by_id.pop(at, None)):
        ordered.append(row)
        at = row["parent_id"]
    if not ordered and not db.row("select 1 from chats where id = ? and tip_id = ?", [chat_id, tip_id]):
        message_row(db, tip_id)
    if not ordered or ordered[0]["depth"] != len(ordered):
        raise DamagedError(f"the way to message {tip_id} has gaps")
    return messages(db, chat_id, ordered[::-1], tokenizer_hash)


def messages(
    db: ChatDatabase, chat_id: str, rows: Sequence[dict[str, Any]], tokenizer_hash: str | None = None
) -> list[Message]:
    """Records of rows with `MESSAGE_COLUMNS`; text still in chunks is joined on, ids are added when asked for."""
    ids_of: dict[str, tuple[int, ...]] = {}
    if tokenizer_hash is not None:
        found = db.rows(
            "select message_id, ids from message_tokens where tokenizer_hash = ? and message_id in "
            "(select value from json_each(?))",
            [tokenizer_hash, json.dumps([row["id"] for row in rows])],
        )
        ids_of = {row["message_id"]: unpack_ids(row["ids"]) for row in found}
    for row in rows:
        if row["status"] == "incomplete":
            _join_chunks(db, row, ids_of, tokenizer_hash)
    return [message_from_row(row, chat_id, db.note_bad_value, ids_of.get(row["id"])) for row in rows]


def message_row(db: ChatDatabase, message_id: str) -> dict[str, Any]:
    """
    Raises:
        ChatNotFoundError: there is no such message.
    """
    row = db.row(f"select {MESSAGE_COLUMNS}, m.chat_id, m.content_hash from messages m where m.id = ?", [message_id])
    if row is None:
        raise ChatNotFoundError(f"There is no message {message_id}.", "It may have been deleted.")
    return row


def is_in_chat(db: ChatDatabase, chat_id: str, message_id: str) -> bool:
    row = db.row("select chat_id from messages where id = ?", [message_id])
    return row is not None and (row["chat_id"] == chat_id or message_id in inherited_ids(db, chat_id))


def inherited_ids(db: ChatDatabase, chat_id: str) -> set[str]:
    """The messages that a fork took over."""
    row = db.row("select forked_at_id from chats where id = ?", [chat_id])
    if row is None or row["forked_at_id"] is None:
        return set()
    return {found["id"] for found in db.rows(f"{ANCESTORS} select id from up", {"id": row["forked_at_id"]})}


def children(db: ChatDatabase, chat_id: str, parent_id: str | None) -> list[str]:
    """Ids of the messages of this chat right below `parent_id` (None: its roots), oldest first."""
    below = "parent_id = :parent" if parent_id is not None else "parent_id is null"
    inherited = json.dumps(sorted(inherited_ids(db, chat_id)))
    found = db.rows(
        f"select id from messages where {below} "
        "and (chat_id = :chat or id in (select value from json_each(:inherited))) order by seq",
        {"parent": parent_id, "chat": chat_id, "inherited": inherited},
    )
    return [row["id"] for row in found]


def home_of(db: ChatDatabase, message_id: str) -> str:
    """The chat that a message was written in."""
    return message_row(db, message_id)["chat_id"]


def siblings(db: ChatDatabase, chat_id: str, message_id: str) -> list[str]:
    return children(db, chat_id, message_row(db, message_id)["parent_id"])


def versions_on_path(db: ChatDatabase, chat_id: str, tip_id: str | None) -> dict[str, list[str]]:
    """For each message on the way to the tip that has siblings in this chat: all of them, itself included."""
    if tip_id is None:
        return {}
    found = db.rows(
        f"{ANCESTORS} select s.id, s.parent_id, s.chat_id from up join messages s on s.parent_id = up.id "
        "order by s.seq",
        {"id": tip_id},
    )
    inherited = inherited_ids(db, chat_id)
    groups: dict[str, list[str]] = {}
    for row in found:
        if row["chat_id"] == chat_id or row["id"] in inherited:
            groups.setdefault(row["parent_id"], []).append(row["id"])
    on_path = {row["id"] for row in db.rows(f"{ANCESTORS} select id from up", {"id": tip_id})}
    all_groups = [*groups.values(), children(db, chat_id, None)]
    return {at: group for group in all_groups if len(group) > 1 for at in group if at in on_path}


def newest_leaf(db: ChatDatabase, chat_id: str, message_id: str) -> str:
    """The end of the newest branch through `message_id`: the tip to show when a person switches to that version."""
    seen: set[str] = set()
    while message_id not in seen:
        seen.add(message_id)
        below = children(db, chat_id, message_id)
        message_id = below[-1] if below else message_id
    return message_id


def _join_chunks(
    db: ChatDatabase, row: dict[str, Any], ids_of: dict[str, tuple[int, ...]], tokenizer_hash: str | None
) -> None:
    text, ids = chunks(db, row["id"])
    row["content"] += text
    row["num_tokens"] += sum(map(len, ids.values()))
    stored = ids_of.get(row["id"], ())
    if tokenizer_hash is not None and set(ids) <= {tokenizer_hash}:
        ids_of[row["id"]] = stored + ids.get(tokenizer_hash, ())


def chunks(db: ChatDatabase, message_id: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Text, and ids by tokenizer, of what was flushed since the reply was begun or reopened."""
    found = db.rows(
        "select text, tokenizer_hash, ids from reply_chunks where message_id = ? order by position", [message_id]
    )
    packed: dict[str, bytes] = {}
    for row in found:
        if row["ids"]:
            packed[row["tokenizer_hash"]] = packed.get(row["tokenizer_hash"], b"") + row["ids"]
    return "".join(row["text"] for row in found), {name: unpack_ids(raw) for name, raw in packed.items()}
