"""The chat list as rows: groups by pin and age, live badges, ages; and what a search found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..board import LiveReply
from ..cache_records import MISSING, TIERS, CacheReport, Chain
from ..records import ChatSummary, SearchHit
from . import format
from .kv_bar import Cells, kv_bar, tier_word
from .palette import Palette
from .width import Run, cell_len, fit

GROUPS = ("PINNED", "TODAY", "YESTERDAY", "OLDER")
KEPT_CELLS = 8


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
    bar: Cells | None = None
    """A line about the chat above it, and this stands before the label."""

    @property
    def key(self) -> tuple[str, str | None] | None:
        return None if self.bar is not None else self.owner_key

    @property
    def owner_key(self) -> tuple[str, str | None] | None:
        return (self.chat_id, self.message_id) if self.chat_id is not None else None

    def runs(self, width: int, palette: Palette) -> list[Run]:
        if self.chat_id is None:
            return [(fit(self.label, width), palette.dim)]
        if self.bar is not None:
            bar: list[Run] = [(text, palette.tier(tier)) for text, tier in self.bar]
            room = width - 4 - sum(cell_len(text) for text, _ in self.bar) - cell_len(self.right)
            return [("    ", palette.dim), *bar, (fit(self.label, room), palette.dim), (self.right, palette.dim)]
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
    kept: Mapping[str, Sequence[ChatRow]] = MappingProxyType({}),
) -> list[ChatRow]:
    """All rows; `kept` are those that `kept_rows` made. With a query: the chats whose title holds it, then the messages
    that the full-text search found."""
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
            for chat in members:
                rows.append(_chat(chat, live.get(chat.id), now, palette))
                rows += () if needle else kept.get(chat.id, ())
    if needle and hits:
        rows += _hits(hits, is_first=not rows)
    if not rows:
        rows.append(ChatRow(" nothing found" if needle else " no chats yet"))
    return rows


def kept_rows(report: CacheReport, device: str, palette: Palette) -> dict[str, tuple[ChatRow, ...]]:
    """What stands under the chats of which the cache holds something: where it lies, and what it saves."""
    return {chain.chat_id: tuple(_kept(chain, device, palette)) for chain in report.chains if chain.runs}


def _kept(chain: Chain, device: str, palette: Palette) -> Iterator[ChatRow]:
    bar = kv_bar(chain.runs, KEPT_CELLS, palette.glyphs)
    count = f"{format.tokens(chain.num_tokens)} tok"
    yield ChatRow(f" {where_kept(chain, device)}", count, chat_id=chain.chat_id, bar=bar)
    is_below = chain.num_by_tier.keys() & {"host", "disk"}
    if is_below and chain.resume_s is not None and chain.compute_s is not None and not chain.is_running:
        words = f"resume ~{format.rough(chain.resume_s)} (else {format.rough(chain.compute_s)})"
        yield ChatRow(words, chat_id=chain.chat_id, bar=())


def where_kept(chain: Chain, device: str) -> str:
    """The tier that holds all of a chain, or `pool+disk`; `part` when something is in none."""
    counts = chain.num_by_tier
    tiers = [tier_word(tier, device) for tier in TIERS if tier in counts]
    if not tiers:
        return "not kept"
    return "part" if MISSING in counts else "+".join(tiers)


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
    title = f"{glyphs.private} {chat.shown_title}" if chat.is_private else chat.shown_title
    if live is None:
        return ChatRow(title, right, glyphs.star if chat.is_pinned else " ", "dim", chat.id)
    badge, tone = (glyphs.writing, "good") if live.phase == "writing" else (glyphs.waiting, "warn")
    return ChatRow(title, badge_text(live), badge, tone, chat.id)


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
