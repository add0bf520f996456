"""What the service tells of chats, as records. Everything is sanitised here, on its way into the view, and (in
`service_records`) nowhere else.

Readers are tolerant: an unknown field is ignored, a missing one has a default, so that one odd row never hides a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .cache_records import TIERS, Reuse
from .json_fields import Json, integer, mapping, number, string
from .render.sanitize import sanitize, sanitize_line

SNIPPET_LEAD_CHARS = 12


@dataclass(frozen=True)
class ReplyStats:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    prefill_s: float = 0.0
    cached_by_tier: tuple[tuple[str, int], ...] = ()
    """(tier, prompt tokens that came from there), fastest first; tiers without any are left out."""
    load_s: float | None = None
    """How long reading lower tiers takes, as measured before; None when nothing was loaded."""
    reuse: Reuse = field(default_factory=Reuse)

    @classmethod
    def from_json(cls, data: Json | None) -> ReplyStats | None:
        if not data:
            return None
        debug = mapping(data, "chatkv")
        load, by_tier = mapping(debug, "load"), mapping(debug, "cached_by_tier") or mapping(data, "cached_by_tier")
        return cls(
            integer(data, "num_prompt_tokens"),
            integer(data, "num_cached_tokens"),
            number(data, "ttft_s"),
            number(data, "tokens_per_s"),
            integer(data, "num_tokens"),
            number(data, "prefill_s"),
            tuple((tier, integer(by_tier, tier)) for tier in TIERS if integer(by_tier, tier)),
            number(load, "load_s") if load.get("is_loaded") and load.get("num_loaded_tokens") else None,
            Reuse.from_json({**data, **debug}),
        )

    @property
    def num_missed_tokens(self) -> int:
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)


@dataclass(frozen=True)
class Message:
    id: str
    chat_id: str = ""
    parent_id: str | None = None
    role: str = "user"
    content: str = ""
    num_source_chars: int = 0
    """Length of the content as stored, before sanitising: deltas count in these."""
    status: str = "complete"
    error: str = ""
    created_at: float = 0.0
    model: str = ""
    num_tokens: int = 0
    stats: ReplyStats | None = None

    @classmethod
    def from_json(cls, data: Json) -> Message:
        content = string(data, "content")
        return cls(
            id=str(data.get("id", "")),
            chat_id=str(data.get("chat_id", "")),
            parent_id=data.get("parent_id") and str(data["parent_id"]),
            role=string(data, "role") or "user",
            content=sanitize(content),
            num_source_chars=len(content),
            status=string(data, "status") or "complete",
            error=sanitize_line(string(data, "error")),
            created_at=number(data, "created_at"),
            model=sanitize_line(string(data, "model")),
            num_tokens=integer(data, "num_tokens"),
            stats=ReplyStats.from_json(data.get("stats")),
        )

    @property
    def is_reply(self) -> bool:
        return self.role == "assistant"

    def extended(self, text: str) -> Message:
        """The reply with more (unsanitised) text."""
        return replace(self, content=self.content + sanitize(text), num_source_chars=self.num_source_chars + len(text))


@dataclass(frozen=True)
class ChatSummary:
    id: str
    title: str = ""
    updated_at: float = 0.0
    is_pinned: bool = False
    is_private: bool = False
    model: str = ""
    num_tokens: int = 0
    state: str = "idle"

    @classmethod
    def from_json(cls, data: Json) -> ChatSummary:
        return cls(
            id=str(data.get("id", "")),
            title=sanitize_line(string(data, "title")),
            updated_at=number(data, "updated_at"),
            is_pinned=bool(data.get("is_pinned")),
            is_private=bool(data.get("is_private")),
            model=sanitize_line(string(data, "model")),
            num_tokens=integer(data, "num_tokens"),
            state=string(data, "state") or "idle",
        )

    @property
    def shown_title(self) -> str:
        return self.title or "New chat"


@dataclass(frozen=True)
class Conversation:
    """One chat, open: root to tip."""

    summary: ChatSummary
    messages: tuple[Message, ...] = ()
    siblings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""
    context_start_id: str | None = None

    @classmethod
    def from_json(cls, data: Json) -> Conversation:
        chat = data.get("chat") or {}
        return cls(
            summary=ChatSummary.from_json(chat),
            messages=tuple(Message.from_json(message) for message in data.get("messages") or ()),
            siblings={str(key): tuple(map(str, ids)) for key, ids in (data.get("siblings") or {}).items()},
            system=sanitize(string(chat, "system")),
            sampling=chat.get("sampling") or {},
            draft=sanitize(string(chat, "draft")),
            context_start_id=chat.get("context_start_id"),
        )


@dataclass(frozen=True)
class SearchHit:
    chat_id: str
    title: str
    message_id: str
    snippet: str
    """From a few words before the match on, since the list is narrow."""

    @classmethod
    def from_json(cls, data: Json) -> SearchHit:
        return cls(
            str(data.get("chat_id", "")),
            sanitize_line(string(data, "title")),
            str(data.get("message_id", "")),
            sanitize_line(_from_match(string(data, "snippet"), data.get("marks"))),
        )


def _from_match(snippet: str, marks: Any) -> str:
    """`marks` are (start, end) of the words found."""
    try:
        start = max(0, int(marks[0][0]) - SNIPPET_LEAD_CHARS)
    except (TypeError, ValueError, LookupError):
        return snippet
    begin = snippet.rfind(" ", 0, start + 1) + 1
    return f"…{snippet[begin:]}" if begin else snippet


@dataclass(frozen=True)
class OverflowChoice:
    """One way out of a full context; the service counted what it costs."""

    kind: str
    context_start_id: str | None = None
    num_turns: int = 0
    num_tokens_after: int = 0

    @classmethod
    def from_json(cls, data: Json) -> OverflowChoice:
        return cls(
            string(data, "kind"),
            data.get("context_start_id"),
            integer(data, "num_turns"),
            integer(data, "num_tokens_after"),
        )
