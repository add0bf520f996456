"""What the store hands out: frozen records, and their JSON as the service sends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class MessageStatus(StrEnum):
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    """Being written now."""
    STOPPED = "stopped"
    """By the person, or because the service ended in the middle of it."""
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The system prompt and the sampling of one chat. None: the model's or the program's default."""

    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """The fields that were set, without the system prompt."""
        return {name: value for name, value in asdict(self).items() if name != "system" and value is not None}

    def to_json(self) -> dict[str, Any]:
        return {"system": self.system, "sampling": self.sampling}

    @classmethod
    def from_json(cls, value: object) -> ChatSettings:
        """The inverse of `to_json`; names it does not know are ignored.

        Raises:
            ValueError: a value has the wrong type.
        """
        if not isinstance(value, dict):
            raise ValueError("settings are not an object")
        system, sampling = value.get("system", ""), value.get("sampling", {})
        if not isinstance(system, str) or not isinstance(sampling, dict):
            raise ValueError("settings have fields of the wrong type")
        known: dict[str, Any] = {}
        for name in (entry.name for entry in fields(cls) if entry.name != "system"):
            number = sampling.get(name)
            whole = name in ("top_k", "max_tokens", "seed")
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, int if whole else int | float)
            ):
                raise ValueError(f"sampling.{name} is not a number: {number!r}")
            known[name] = number
        return cls(system=system, **known)


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """How a reply was made. Times in seconds; `cached_by_tier` counts prompt tokens."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    num_tokens: int = 0
    """Sampled by the last request: of a reply that was continued, what is older is part of the prompt."""
    prefill_s: float | None = None
    chatkv: Mapping[str, Any] | None = None
    """What the prompt found in the cache, what was decided, and where it was missed (JSON)."""

    def to_json(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)} | {
            "cached_by_tier": dict(self.cached_by_tier)
        }

    @classmethod
    def from_json(cls, value: object) -> ReplyStats:
        """The inverse of `to_json`; names it does not know are ignored.

        Raises:
            ValueError: it is not an object, or a value has the wrong type.
        """
        if not isinstance(value, dict) or not isinstance(value.get("cached_by_tier", {}), dict):
            raise ValueError("stats are not an object")
        known = {entry.name: value[entry.name] for entry in fields(cls) if entry.name in value}
        for name, number in known.items():
            if name == "cached_by_tier":
                continue
            if name == "chatkv":
                if not isinstance(number, dict | None):
                    raise ValueError("stats.chatkv is not an object")
                continue
            is_optional = name in ("ttft_s", "tokens_per_s", "prefill_s")
            if not (isinstance(number, int | float) or (number is None and is_optional)):
                raise ValueError(f"stats.{name} is not a number: {number!r}")
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Message:
    """One node of the tree, as seen from the chat that it was asked through (`chat_id`)."""

    id: str
    chat_id: str
    parent_id: str | None
    role: Role
    content: str
    status: MessageStatus
    created_at: float
    """Seconds since the epoch."""
    error: str | None = None
    model: str | None = None
    num_tokens: int = 0
    stats: ReplyStats | None = None
    token_ids: tuple[int, ...] | None = None
    """Exact ids of the content, when they were asked for by tokenizer and are known."""

    def to_json(self) -> dict[str, Any]:
        """Without the token ids: they are the service's business."""
        return {
            "id": self.id,
            "chat_id": self.chat_id,
            "parent_id": self.parent_id,
            "role": self.role.value,
            "content": self.content,
            "status": self.status.value,
            "error": self.error,
            "created_at": self.created_at,
            "model": self.model,
            "num_tokens": self.num_tokens,
            "stats": self.stats.to_json() if self.stats else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSummary:
    """One line of the chat list."""

    id: str
    title: str
    created_at: float
    updated_at: float
    """Time of the last turn, not of the last change of title, pin or draft."""
    is_pinned: bool = False
    is_private: bool = False
    model: str | None = None
    num_messages: int = 0
    """On the path to the tip."""
    num_tokens: int = 0
    """On the path to the tip."""
    trashed_at: float | None = None

    @property
    def in_trash(self) -> bool:
        return self.trashed_at is not None

    def to_json(self, state: str = "idle") -> dict[str, Any]:
        """`state` is the engine's view of the chat: idle, waiting, reading or writing."""
        return {
            "id": self.id,
            "title": self.title,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "is_pinned": self.is_pinned,
            "is_private": self.is_private,
            "model": self.model,
            "num_messages": self.num_messages,
            "num_tokens": self.num_tokens,
            "state": state,
            "in_trash": self.in_trash,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(ChatSummary):
    """A chat: a name for a tip, with its settings and its draft."""

    settings: ChatSettings = ChatSettings()
    draft: str = ""
    tip_id: str | None = None
    """The last message shown; None while the chat is empty."""
    context_start_id: str | None = None
    """Where the history that is sent begins, after old turns were dropped; None: at the root."""
    forked_at_id: str | None = None
    """The last message that this chat took over from the chat that it was forked from."""

    def to_json(self, state: str = "idle") -> dict[str, Any]:
        return ChatSummary.to_json(self, state) | {
            **self.settings.to_json(),
            "draft": self.draft,
            "tip_id": self.tip_id,
            "context_start_id": self.context_start_id,
        }


@dataclass(frozen=True, slots=True)
class SearchHit:
    chat_id: str
    title: str
    message_id: str
    role: Role
    snippet: str
    """One line of text around the match."""
    marks: tuple[tuple[int, int], ...] = ()
    """Where the words lie in the snippet: (start, end) in characters."""

    def to_json(self) -> dict[str, Any]:
        return {
            "chat_id": self.chat_id,
            "title": self.title,
            "message_id": self.message_id,
            "role": self.role.value,
            "snippet": self.snippet,
            "marks": [list(mark) for mark in self.marks],
        }


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was lost when a damaged database was opened."""

    reason: str
    """What the check said."""
    damaged_file: str | None
    """Where the damaged file was moved; None when single rows were mended in place."""
    num_chats: int
    num_messages: int
    num_lost: int
    """Rows that could not be read, as far as they left a trace."""
    num_set_aside: int
    """Rows or values that were read but made no sense: kept in the table `damaged`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
