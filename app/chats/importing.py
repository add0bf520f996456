"""Taking in chats that were exported as JSON: all of a file or nothing, and nothing twice."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from . import chats, tree
from .database import ChatDatabase, clean_text
from .errors import ImportRefusedError
from .export import FORMAT, FORMAT_VERSION, rows_of_chat
from .records import Chat, ChatSettings, MessageStatus, ReplyStats, Role
from .rows import dump_settings, dump_stats, pack_ids


@dataclass(frozen=True, slots=True)
class ImportResult:
    chat: Chat
    is_duplicate: bool
    """The chat was here already; nothing was written."""
    num_messages: int
    """Messages that were added."""


def import_json(db: ChatDatabase, text: str) -> ImportResult:
    document = _parsed(text)
    source, messages = document["chat"], _parents_first(document["messages"])
    hashes: dict[str, bytes] = {}
    for message in messages:
        parent_hash = hashes.get(message["parent_id"]) if message["parent_id"] else None
        hashes[message["id"]] = tree.content_hash(parent_hash, message["role"], message["content"])
    known = _chat_that_has_all(db, set(hashes.values()))
    if known is not None:
        return ImportResult(chats.get(db, known), True, 0)
    with db.write(is_durable=True):
        chat_id = _insert(db, source, messages, hashes)
    return ImportResult(chats.get(db, chat_id), False, len(messages))


def _insert(db: ChatDatabase, source: dict[str, Any], messages: list[dict[str, Any]], hashes: dict[str, bytes]) -> str:
    """Row ids are made anew: the same ids may be here with other text."""
    chat_id, new_ids = db.new_id(), {message["id"]: db.new_id() for message in messages}
    created_at = db.now() if source["created_at"] is None else source["created_at"]
    db.sql.table("chats").insert(
        {
            "id": chat_id,
            "title": source["title"],
            "model": source["model"],
            "settings": dump_settings(source["settings"]),
            "draft": source["draft"],
            "is_pinned": int(source["is_pinned"]),
            "tip_id": new_ids.get(source["tip_id"], next(reversed(new_ids.values()), None)),
            "context_start_id": new_ids.get(source["context_start_id"]),
            "created_at": created_at,
            "updated_at": created_at if source["updated_at"] is None else source["updated_at"],
        }
    )
    places: dict[str, tuple[int, int]] = {}
    for message in messages:
        depth, num_path_tokens = places.get(message["parent_id"], (0, 0))
        places[message["id"]] = depth + 1, num_path_tokens + message["num_tokens"]
        db.sql.table("messages").insert(
            {
                "id": new_ids[message["id"]],
                "chat_id": chat_id,
                "parent_id": new_ids.get(message["parent_id"]),
                "depth": depth + 1,
                "role": message["role"],
                "content": message["content"],
                "status": message["status"],
                "error": message["error"],
                "created_at": created_at if message["created_at"] is None else message["created_at"],
                "model": message["model"],
                "num_tokens": message["num_tokens"],
                "num_path_tokens": num_path_tokens + message["num_tokens"],
                "stats": dump_stats(message["stats"]),
                "content_hash": hashes[message["id"]],
            }
        )
        for tokenizer_hash, ids in message["token_ids"].items():
            db.sql.execute(
                "insert into message_tokens(message_id, tokenizer_hash, ids) values (?, ?, ?)",
                [new_ids[message["id"]], tokenizer_hash, ids],
            )
    return chat_id


def _chat_that_has_all(db: ChatDatabase, hashes: set[bytes]) -> str | None:
    """A chat outside the trash that holds every one of these messages."""
    if not hashes:
        return None
    some = next(iter(hashes))
    for row in db.rows(
        "select distinct m.chat_id from messages m join chats c on c.id = m.chat_id "
        "where m.content_hash = ? and c.trashed_at is null",
        [some],
    ):
        have = {found["content_hash"] for found in rows_of_chat(db, row["chat_id"])}
        if hashes <= have:
            return row["chat_id"]
    return None


def _parsed(text: str) -> dict[str, Any]:
    """The document with every field checked and in the store's own types."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        if document["version"] != FORMAT_VERSION:
            raise ValueError(f"its version is {document['version']!r}, this program reads {FORMAT_VERSION}")
        chat = document["chat"]
        chat = chat | {
            "title": _string(chat.get("title", "")),
            "model": _optional(chat.get("model")),
            "draft": _string(chat.get("draft", "")),
            "settings": ChatSettings.from_json(chat),
            "is_pinned": chat.get("is_pinned") is True,
            "tip_id": _optional(chat.get("tip_id")),
            "context_start_id": _optional(chat.get("context_start_id")),
            "created_at": _seconds(chat.get("created_at")),
            "updated_at": _seconds(chat.get("updated_at")),
        }
        messages = [_checked(message) for message in document["messages"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ImportRefusedError(
            f"This is not a chat exported by chatkv: {detail}.", "Export it with: chatkv chats export ID --format json"
        ) from error
    return {"chat": chat, "messages": messages}


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    status = MessageStatus(message.get("status", MessageStatus.COMPLETE))
    return message | {
        "id": _string(message["id"]),
        "parent_id": _optional(message["parent_id"]),
        "role": Role(message["role"]).value,
        "content": _string(message["content"]),
        "status": (MessageStatus.STOPPED if status is MessageStatus.INCOMPLETE else status).value,
        "error": _optional(message.get("error")),
        "model": _optional(message.get("model")),
        "created_at": _seconds(message.get("created_at")),
        "num_tokens": _count(message.get("num_tokens", 0)),
        "stats": None if message.get("stats") is None else ReplyStats.from_json(message["stats"]),
        "token_ids": {_string(name): pack_ids(ids) for name, ids in message.get("token_ids", {}).items()},
    }


def _parents_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Raises:
        ImportRefusedError: an id is used twice, a parent is missing, or the parents form a ring.
    """
    waiting: dict[str | None, list[dict[str, Any]]] = {}
    for message in messages:
        waiting.setdefault(message["parent_id"], []).append(message)
    ordered = list(waiting.pop(None, []))
    for message in ordered:
        ordered += waiting.pop(message["id"], [])
    if waiting or len({message["id"] for message in ordered}) != len(messages):
        raise ImportRefusedError("This export is damaged: its messages do not form a tree.", "Export the chat again.")
    # The order of the file is the order of writing, if only parents come before children in it.
    place = {message["id"]: number for number, message in enumerate(messages)}
    is_sorted = all(place[message["parent_id"]] < place[message["id"]] for message in messages if message["parent_id"])
    return messages if is_sorted else ordered


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r:.80}")
    return clean_text(value)


def _optional(value: object) -> str | None:
    return None if value is None else _string(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"expected a number of tokens, found {value!r:.80}")
    return int(value)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a time in seconds, found {value!r:.80}")
    return float(value)
