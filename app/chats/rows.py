"""Rows to records. A value that makes no sense never hides its row: it is replaced, and the reader is told."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable
from sys import byteorder
from typing import Any

from .records import Chat, ChatSettings, ChatSummary, Message, MessageStatus, ReplyStats, Role

OnBadValue = Callable[[str, str, str, str, object, object], None]
"""Called with table, row id, column, reason, the raw value and the one to put in its place."""

CHAT_COLUMNS = (
    "c.id, c.title, c.model, c.settings, c.draft, c.is_pinned, c.tip_id, c.context_start_id, c.forked_at_id, "
    "c.created_at, c.updated_at, c.trashed_at, t.depth as num_messages, t.num_path_tokens as num_tokens"
)
SUMMARY_COLUMNS = (
    "c.id, c.title, c.model, c.is_pinned, c.created_at, c.updated_at, c.trashed_at, "
    "t.depth as num_messages, t.num_path_tokens as num_tokens"
)
CHAT_TABLES = "chats c left join messages t on t.id = c.tip_id"
MESSAGE_COLUMNS = (
    "m.id, m.parent_id, m.depth, m.role, m.content, m.status, m.error, m.created_at, m.model, m.num_tokens, m.stats"
)


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as u32le."""
    ids = array("I", token_ids)
    if byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(raw: object) -> tuple[int, ...]:
    """The inverse of `pack_ids`; empty when `raw` is no such bytes."""
    if not isinstance(raw, bytes) or len(raw) % 4:
        return ()
    ids = array("I", raw)
    if byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def summary_from_row(row: dict[str, Any], is_private: bool) -> ChatSummary:
    return ChatSummary(**_summary_fields(row, is_private))


def chat_from_row(row: dict[str, Any], is_private: bool, on_bad: OnBadValue) -> Chat:
    settings = ChatSettings()
    try:
        settings = ChatSettings.from_json(json.loads(row["settings"]))
    except (ValueError, TypeError, RecursionError) as error:
        on_bad("chats", row["id"], "settings", f"unreadable: {error}", row["settings"], dump_settings(settings))
    return Chat(
        **_summary_fields(row, is_private),
        settings=settings,
        draft=_text(row["draft"]),
        tip_id=row["tip_id"],
        context_start_id=row["context_start_id"],
        forked_at_id=row["forked_at_id"],
    )


def message_from_row(
    row: dict[str, Any], chat_id: str, on_bad: OnBadValue, token_ids: tuple[int, ...] | None = None
) -> Message:
    def bad(column: str, reason: str, mended: object) -> None:
        on_bad("messages", row["id"], column, reason, row[column], mended)

    role, status, stats = Role.USER, MessageStatus.STOPPED, None
    try:
        role = Role(row["role"])
    except ValueError:
        role = Role.ASSISTANT if row["model"] else Role.USER
        bad("role", "unknown role", role.value)
    try:
        status = MessageStatus(row["status"])
    except ValueError:
        bad("status", "unknown status", status.value)
    if row["stats"] is not None:
        try:
            stats = ReplyStats.from_json(json.loads(row["stats"]))
        except (ValueError, TypeError, RecursionError) as error:
            bad("stats", f"unreadable: {error}", None)
    return Message(
        id=row["id"],
        chat_id=chat_id,
        parent_id=row["parent_id"],
        role=role,
        content=_text(row["content"]),
        status=status,
        created_at=_seconds(row["created_at"]),
        error=None if row["error"] is None else _text(row["error"]),
        model=None if row["model"] is None else _text(row["model"]),
        num_tokens=_count(row["num_tokens"]),
        stats=stats,
        token_ids=token_ids,
    )


def dump_settings(settings: ChatSettings) -> str:
    return json.dumps(settings.to_json(), ensure_ascii=False, sort_keys=True)


def dump_stats(stats: ReplyStats | None) -> str | None:
    return None if stats is None else json.dumps(stats.to_json(), sort_keys=True)


def _summary_fields(row: dict[str, Any], is_private: bool) -> dict[str, Any]:
    return {
        "id": row["id"],
        "title": _text(row["title"]),
        "model": None if row["model"] is None else _text(row["model"]),
        "created_at": _seconds(row["created_at"]),
        "updated_at": _seconds(row["updated_at"]),
        "is_pinned": bool(row["is_pinned"]),
        "is_private": is_private,
        "num_messages": _count(row["num_messages"]),
        "num_tokens": _count(row["num_tokens"]),
        "trashed_at": None if row["trashed_at"] is None else _seconds(row["trashed_at"]),
    }


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else "" if value is None else str(value)


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
