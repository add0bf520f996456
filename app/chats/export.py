"""Chats as files: JSON that loses nothing (importing.py takes it in again), Markdown for people."""

from __future__ import annotations

import json
import time
from typing import Any

from . import chats, tree
from .database import ChatDatabase
from .records import MessageStatus, Role
from .rows import MESSAGE_COLUMNS, unpack_ids

FORMAT = "chatkv-chat"
FORMAT_VERSION = 1


def as_json(db: ChatDatabase, chat_id: str) -> str:
    chat = chats.get(db, chat_id)
    rows = rows_of_chat(db, chat_id)
    ids = _token_ids(db, [row["id"] for row in rows])
    exported = [
        message.to_json() | {"token_ids": ids.get(message.id, {})} for message in tree.messages(db, chat_id, rows)
    ]
    for message in exported:
        del message["chat_id"]
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "chat": {
            "id": chat.id,
            "title": chat.title,
            "model": chat.model,
            **chat.settings.to_json(),
            "draft": chat.draft,
            "is_pinned": chat.is_pinned,
            "tip_id": chat.tip_id,
            "context_start_id": chat.context_start_id,
            "created_at": chat.created_at,
            "updated_at": chat.updated_at,
        },
        "messages": exported,
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def as_markdown(db: ChatDatabase, chat_id: str) -> str:
    chat = chats.get(db, chat_id)
    parts = [f"# {' '.join(chat.title.split()) or 'Chat'}"]
    if chat.settings.system:
        parts += ["## System prompt", chat.settings.system]
    for message in tree.path(db, chat_id, chat.tip_id):
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(message.created_at))
        who = {Role.USER: "You", Role.ASSISTANT: "Assistant"}.get(message.role, message.role.value.capitalize())
        notes = [when, *([message.model] if message.model else [])]
        if message.status is not MessageStatus.COMPLETE:
            notes.append(message.status.value)
        parts += [f"## {who} ({', '.join(notes)})", message.content]
        if message.error:
            parts.append(f"> Error: {message.error}")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def rows_of_chat(db: ChatDatabase, chat_id: str) -> list[dict[str, Any]]:
    """Everything the chat holds: what was written in it and what it took over as a fork."""
    inherited = json.dumps(sorted(tree.inherited_ids(db, chat_id)))
    return db.rows(
        f"select {MESSAGE_COLUMNS}, m.content_hash from messages m where m.chat_id = ? "
        "or m.id in (select value from json_each(?)) order by m.seq",
        [chat_id, inherited],
    )


def _token_ids(db: ChatDatabase, message_ids: list[str]) -> dict[str, dict[str, list[int]]]:
    found = db.rows(
        "select message_id, tokenizer_hash, ids from message_tokens "
        "where message_id in (select value from json_each(?))",
        [json.dumps(message_ids)],
    )
    ids: dict[str, dict[str, list[int]]] = {}
    for row in found:
        ids.setdefault(row["message_id"], {})[row["tokenizer_hash"]] = list(unpack_ids(row["ids"]))
    return ids
