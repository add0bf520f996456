"""The chats themselves: names for tips, their settings, their list."""

from __future__ import annotations

import json
import unicodedata
from enum import Enum
from typing import Any

from . import search, tree
from .database import ChatDatabase, clean_text
from .errors import ChatNotFoundError, ChatStateError
from .records import Chat, ChatSettings, ChatSummary
from .rows import CHAT_COLUMNS, CHAT_TABLES, SUMMARY_COLUMNS, chat_from_row, dump_settings, summary_from_row


class Unset(Enum):
    """The default of an argument for which None is a value."""

    UNSET = "unset"


UNSET = Unset.UNSET


def create(db: ChatDatabase, title: str, model: str | None, settings: ChatSettings) -> Chat:
    chat_id, now = db.new_id(), db.now()
    with db.write():
        db.sql.table("chats").insert(
            {
                "id": chat_id,
                "title": clean_text(title),
                "model": model,
                "settings": clean_text(dump_settings(settings)),
                "created_at": now,
                "updated_at": now,
            }
        )
    return get(db, chat_id)


def get(db: ChatDatabase, chat_id: str) -> Chat:
    """
    Raises:
        ChatNotFoundError: there is no such chat.
    """
    row = db.row(f"select {CHAT_COLUMNS} from {CHAT_TABLES} where c.id = ?", [chat_id])
    if row is None:
        raise _not_found(chat_id)
    return chat_from_row(row, db.is_private, db.note_bad_value)


def open_row(db: ChatDatabase, chat_id: str) -> dict[str, Any]:
    """The raw row of a chat that can be written to.

    Raises:
        ChatNotFoundError, ChatStateError: there is none, or it is in the trash.
    """
    row = db.row("select id, title, draft, tip_id, trashed_at from chats where id = ?", [chat_id])
    if row is None:
        raise _not_found(chat_id)
    if row["trashed_at"] is not None:
        raise ChatStateError(f"The chat '{row['title']}' is in the trash.", "Restore it first.")
    return row


def update(
    db: ChatDatabase,
    chat_id: str,
    title: str | Unset,
    draft: str | Unset,
    settings: ChatSettings | Unset,
    is_pinned: bool | Unset,
    model: str | Unset | None,
    tip_id: str | Unset | None,
    context_start_id: str | Unset | None,
) -> Chat:
    values: dict[str, Any] = {
        "title": title if title is UNSET else clean_text(title),
        "draft": draft if draft is UNSET else clean_text(draft),
        "settings": settings if settings is UNSET else clean_text(dump_settings(settings)),
        "is_pinned": is_pinned if is_pinned is UNSET else int(is_pinned),
        "model": model,
        "tip_id": tip_id,
        "context_start_id": context_start_id,
    }
    changes = {name: value for name, value in values.items() if value is not UNSET}
    with db.write():
        if not db.row("select 1 from chats where id = ?", [chat_id]):
            raise _not_found(chat_id)
        for name in ("tip_id", "context_start_id"):
            at = changes.get(name)
            if at is not None and not tree.is_in_chat(db, chat_id, at):
                raise ChatStateError(f"Message {at} is not in this chat.", "Open the chat again.")
        if changes:
            db.sql.table("chats").update(chat_id, changes)
    return get(db, chat_id)


def fork(db: ChatDatabase, chat_id: str, message_id: str) -> Chat:
    """A new chat whose tip is `message_id`; it shares the rows up to there."""
    chat = get(db, chat_id)
    new_id, now = db.new_id(), db.now()
    with db.write():
        open_row(db, chat_id)
        if not tree.is_in_chat(db, chat_id, message_id):
            raise ChatStateError(f"Message {message_id} is not in this chat.", "Open the chat again.")
        on_path = {row["id"] for row in db.rows(f"{tree.ANCESTORS} select id from up", {"id": message_id})}
        db.sql.table("chats").insert(
            {
                "id": new_id,
                "title": chat.title,
                "model": chat.model,
                "settings": dump_settings(chat.settings),
                "tip_id": message_id,
                "forked_at_id": message_id,
                "context_start_id": chat.context_start_id if chat.context_start_id in on_path else None,
                "created_at": now,
                "updated_at": now,
            }
        )
    return get(db, new_id)


def summaries(db: ChatDatabase, query: str, in_trash: bool, limit: int | None = None) -> list[ChatSummary]:
    """Pinned ones first, then by the time of the last turn. `query` is looked for in titles and messages."""
    where = f"c.trashed_at is {'not ' if in_trash else ''}null"
    order = "c.is_pinned desc, c.updated_at desc, c.id"
    parameters: dict[str, Any] = {"limit": -1 if limit is None else limit}
    if query.strip():
        words = fold(query).split()
        found = search.chat_ids(db, query)
        all_rows = db.rows(f"select c.id, c.title from chats c where {where} order by {order}")
        chosen = [row["id"] for row in all_rows if row["id"] in found or _has_all(fold(str(row["title"])), words)]
        parameters["chosen"] = json.dumps(chosen[:limit])
        where += " and c.id in (select value from json_each(:chosen))"
    # The limit comes before the join: a tip may be a long row.
    rows = db.rows(
        f"select {SUMMARY_COLUMNS} from (select * from chats c where {where} order by {order} limit :limit) c "
        f"left join messages t on t.id = c.tip_id order by {order}",
        parameters,
    )
    return [summary_from_row(row, db.is_private) for row in rows]


def fold(text: str) -> str:
    """Without case and accents, as the search index does it."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))


def _has_all(text: str, words: list[str]) -> bool:
    return all(word in text for word in words)


def _not_found(chat_id: str) -> ChatNotFoundError:
    return ChatNotFoundError(f"There is no chat {chat_id}.", "It may have been deleted; see the list of chats.")
