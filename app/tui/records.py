"""What the service tells, as records. Everything is sanitised here, on its way into the view, and nowhere else.

Readers are tolerant: an unknown field is ignored, a missing one has a default, so that one odd row never hides a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .render.sanitize import sanitize, sanitize_line

Json = Mapping[str, Any]


@dataclass(frozen=True)
class ReplyStats:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    prefill_s: float = 0.0

    @classmethod
    def from_json(cls, data: Json | None) -> ReplyStats | None:
        if not data:
            return None
        return cls(
            _integer(data, "num_prompt_tokens"),
            _integer(data, "num_cached_tokens"),
            _number(data, "ttft_s"),
            _number(data, "tokens_per_s"),
            _integer(data, "num_tokens"),
            _number(data, "prefill_s"),
        )


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
        content = _string(data, "content")
        return cls(
            id=str(data.get("id", "")),
            chat_id=str(data.get("chat_id", "")),
            parent_id=data.get("parent_id") and str(data["parent_id"]),
            role=_string(data, "role") or "user",
            content=sanitize(content),
            num_source_chars=len(content),
            status=_string(data, "status") or "complete",
            error=sanitize_line(_string(data, "error")),
            created_at=_number(data, "created_at"),
            model=sanitize_line(_string(data, "model")),
            num_tokens=_integer(data, "num_tokens"),
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
    num_messages: int = 0
    num_tokens: int = 0
    state: str = "idle"

    @classmethod
    def from_json(cls, data: Json) -> ChatSummary:
        return cls(
            id=str(data.get("id", "")),
            title=sanitize_line(_string(data, "title")),
            updated_at=_number(data, "updated_at"),
            is_pinned=bool(data.get("is_pinned")),
            is_private=bool(data.get("is_private")),
            model=sanitize_line(_string(data, "model")),
            num_messages=_integer(data, "num_messages"),
            num_tokens=_integer(data, "num_tokens"),
            state=_string(data, "state") or "idle",
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
            system=sanitize(_string(chat, "system")),
            sampling=chat.get("sampling") or {},
            draft=sanitize(_string(chat, "draft")),
            context_start_id=chat.get("context_start_id"),
        )


@dataclass(frozen=True)
class ModelState:
    """The model that the service holds, or is loading."""

    name: str = ""
    state: str = "no_model"
    progress: float = 0.0
    error: str = ""
    context_tokens: int = 0
    weight_format: str = ""

    @classmethod
    def from_json(cls, data: Json | None) -> ModelState:
        data = data or {}
        return cls(
            sanitize_line(_string(data, "name")),
            _string(data, "state") or "no_model",
            _number(data, "progress"),
            sanitize_line(_string(data, "error")),
            _integer(data, "context_tokens"),
            sanitize_line(_string(data, "weight_format")),
        )


@dataclass(frozen=True)
class ServiceStatus:
    model: ModelState = field(default_factory=ModelState)
    device: str = ""
    num_running: int = 0
    num_waiting: int = 0
    batch_size: int = 0
    kv_usage: float = 0.0

    @classmethod
    def from_json(cls, data: Json) -> ServiceStatus:
        return cls(
            ModelState.from_json(data.get("model")),
            sanitize_line(_string(data, "device")),
            _integer(data, "num_running"),
            _integer(data, "num_waiting"),
            _integer(data, "batch_size"),
            _number(data, "kv_usage"),
        )


@dataclass(frozen=True)
class ModelOffer:
    """A model of the catalogue or on disk."""

    name: str
    is_installed: bool = False
    is_loaded: bool = False
    size_bytes: int = 0
    download_bytes: int = 0
    licence: str = ""
    context_tokens: int = 0
    description: str = ""
    fits: bool = True

    @classmethod
    def from_json(cls, data: Json) -> ModelOffer:
        return cls(
            sanitize_line(_string(data, "name")),
            bool(data.get("installed")),
            bool(data.get("loaded")),
            _integer(data, "size_bytes"),
            _integer(data, "download_bytes"),
            sanitize_line(_string(data, "licence")),
            _integer(data, "context_tokens"),
            sanitize_line(_string(data, "description")),
            data.get("fits") is not False,
        )


@dataclass(frozen=True)
class Job:
    """A download or an import that the service works on."""

    id: str
    name: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    state: str = "running"
    error: str = ""
    message: str = ""

    @classmethod
    def from_json(cls, data: Json) -> Job:
        return cls(
            str(data.get("id", "")),
            sanitize_line(_string(data, "name")),
            sanitize_line(_string(data, "stage")),
            _integer(data, "done_bytes"),
            _integer(data, "total_bytes"),
            _number(data, "rate_bytes_s"),
            _string(data, "state") or "running",
            sanitize_line(_string(data, "error")),
            sanitize_line(_string(data, "message")),
        )

    @property
    def share(self) -> float:
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0


@dataclass(frozen=True)
class SearchHit:
    chat_id: str
    title: str
    message_id: str
    snippet: str

    @classmethod
    def from_json(cls, data: Json) -> SearchHit:
        return cls(
            str(data.get("chat_id", "")),
            sanitize_line(_string(data, "title")),
            str(data.get("message_id", "")),
            sanitize_line(_string(data, "snippet")),
        )


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
            _string(data, "kind"),
            data.get("context_start_id"),
            _integer(data, "num_turns"),
            _integer(data, "num_tokens_after"),
        )


def _string(data: Json, key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


def _number(data: Json, key: str) -> float:
    value = data.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _integer(data: Json, key: str) -> int:
    return int(_number(data, key))
