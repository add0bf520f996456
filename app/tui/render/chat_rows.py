"""The chat list as rows: groups by pin and age, live badges, ages; and what a search found."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..board import LiveReply
from ..records import ChatSummary, SearchHit
from . import format
from .palette import Palette
from .width import Run, cell_len, fit

GROUPS = ("PINNED", "TODAY", "YESTERDAY", "OLDER")


@dataclass(frozen=True)
class ChatRow:
    """One line; a row without a chat is a heading and cannot be chosen."""

    label: str
    right: str = ""
    badge: str = " "
    tone: str = "dim"
    """The palette's style of badge and right side: dim, good or warn."""
    chat_id: str | None = None
    message_id: str | None = None
    """The message that a search found."""

    def runs(self, width: int, palette: Palette) -> list[Run]:
        if self.chat_id is None:
            return [(fit(self.label, width), palette.dim)]
        badge = f"  {self.badge} "
        room = width - cell_len(badge) - cell_len(self.right) - 1
        right_style = palette.dim if self.tone == "dim" else getattr(palette, self.tone)
        label = fit(self.label, room, palette.glyphs.ellipsis)
        return [(badge, getattr(palette, self.tone)), (label, palette.text), (f" {self.right}", right_style)]


def chat_rows(
    chats: Sequence[ChatSummary],
    live: Mapping[str, LiveReply],
    now: float,
    palette: Palette,
    query: str = "",
    hits: Sequence[SearchHit] = (),
) -> list[ChatRow]:
    """All rows. With a query: the chats whose title holds it, then the messages that the full-text search found."""
    needle = query.casefold().strip()
    found = [chat for chat in chats if needle in chat.shown_title.casefold()]
    found.sort(key=lambda chat: -chat.updated_at)
    rows: list[ChatRow] = []
    midnight = _midnight(now)
    for group in GROUPS:
        members = [chat for chat in found if _group(chat, midnight) == group]
        if members:
            if rows:
                rows.append(ChatRow(""))
            rows.append(ChatRow(f" {group}" if group != "OLDER" else f" {group} ({len(members)})"))
            rows.extend(_chat(chat, live.get(chat.id), now, palette) for chat in members)
    if needle and hits:
        rows += _hits(hits, is_first=not rows)
    if not rows:
        rows.append(ChatRow(" nothing found" if needle else " no chats yet"))
    return rows


def _hits(hits: Sequence[SearchHit], is_first: bool) -> list[ChatRow]:
    """What was found in messages, under the title of each chat."""
    rows = [] if is_first else [ChatRow("")]
    rows.append(ChatRow(" IN MESSAGES"))
    for chat_id in dict.fromkeys(hit.chat_id for hit in hits):
        found = [hit for hit in hits if hit.chat_id == chat_id]
        rows.append(ChatRow(f"  {found[0].title or 'New chat'}"))
        rows += [ChatRow(hit.snippet, chat_id=chat_id, message_id=hit.message_id) for hit in found]
    return rows


def _chat(chat: ChatSummary, live: LiveReply | None, now: float, palette: Palette) -> ChatRow:
    glyphs = palette.glyphs
    right = format.age(max(0.0, now - chat.updated_at)) if chat.updated_at else ""
    if live is None:
        return ChatRow(chat.shown_title, right, glyphs.star if chat.is_pinned else " ", "dim", chat.id)
    badge, tone = (glyphs.writing, "good") if live.phase == "writing" else (glyphs.waiting, "warn")
    return ChatRow(chat.shown_title, badge_text(live), badge, tone, chat.id)


def badge_text(live: LiveReply) -> str:
    """The short form for the list: `31 tok/s`, `read 43 %`, `wait #2`."""
    if live.phase == "writing":
        return f"{live.tokens_per_s:.0f} tok/s" if live.tokens_per_s else "writing"
    if live.phase == "reading":
        return f"read {100 * live.prompt_share:.0f} %"
    return f"wait #{live.queue_position}" if live.queue_position else "waiting"


def _midnight(now: float) -> float:
    moment = time.localtime(now)
    return time.mktime((moment.tm_year, moment.tm_mon, moment.tm_mday, 0, 0, 0, 0, 0, -1))


def _group(chat: ChatSummary, midnight: float) -> str:
    if chat.is_pinned:
        return "PINNED"
    if chat.updated_at >= midnight:
        return "TODAY"
    return "YESTERDAY" if chat.updated_at >= midnight - 86_400 else "OLDER"
