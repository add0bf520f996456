"""All that the app knows of the service, kept current by events. No Textual, no I/O.

Events arrive at any rate and only change state here; the screen takes the changes a few times a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .records import ChatSummary, Message
from .render.sanitize import sanitize_line
from .service_records import Job, ModelState, ServiceStatus

CACHE_EVENTS = frozenset({"hello", "resync", "model", "reply_progress", "reply_delta", "reply_done", "chat_deleted"})
"""Beside a status that is another one."""


@dataclass
class LiveReply:
    """A reply that the service is working on."""

    chat_id: str
    message_id: str = ""
    phase: str = "waiting"
    queue_position: int = 0
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    tokens_per_s: float = 0.0

    @property
    def prompt_share(self) -> float:
        return min(1.0, self.num_computed_tokens / self.num_prompt_tokens) if self.num_prompt_tokens else 0.0


@dataclass
class TextAdded:
    message_id: str
    text: str
    offset: int | None = None
    """Where the text starts in the stored reply, in characters."""


@dataclass
class MessageAdded:
    message: Message


@dataclass
class ReplyDone:
    message: Message


OpenChatEvent = TextAdded | MessageAdded | ReplyDone


@dataclass
class Changes:
    """What is new since the last look."""

    is_list_changed: bool = False
    is_status_changed: bool = False
    are_jobs_changed: bool = False
    is_resync_due: bool = False
    """Events were missed: the list and the open chat have to be fetched again."""
    open_chat: list[OpenChatEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.is_list_changed
            or self.is_status_changed
            or self.are_jobs_changed
            or self.is_resync_due
            or self.open_chat
        )


class Board:
    def __init__(self) -> None:
        self.status = ServiceStatus()
        self.chats: dict[str, ChatSummary] = {}
        self.live: dict[str, LiveReply] = {}
        self.jobs: dict[str, Job] = {}
        self.is_connected = False
        self.is_known = False
        """Whether the service was ever heard: before that, "lost" would be a lie."""
        self.trouble = ""
        """Why the service cannot be started, until it can."""
        self.open_chat_id: str | None = None
        self.num_cache_changes = 0
        """Events so far after which the KV cache may hold something else."""
        self._last_seq: int | None = None
        self._done_ids: deque[str] = deque(maxlen=64)
        self._changes = Changes()

    def take_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    def set_chats(self, chats: list[ChatSummary]) -> None:
        """The full list, as fetched."""
        self.chats = {chat.id: chat for chat in chats}
        self.live = {id: live for id, live in self.live.items() if id in self.chats}
        for chat in chats:
            if chat.state == "idle":
                self.live.pop(chat.id, None)
            self._follow_state(chat)
        self._changes.is_list_changed = True

    def put_chat(self, chat: ChatSummary) -> None:
        self.chats[chat.id] = chat
        self._follow_state(chat)
        self._changes.is_list_changed = True

    def drop_chat(self, chat_id: str) -> None:
        self.chats.pop(chat_id, None)
        self.live.pop(chat_id, None)
        self._changes.is_list_changed = True

    def disconnect(self, trouble: str = "") -> None:
        self.is_connected = False
        self.trouble = sanitize_line(trouble)
        self._last_seq = None
        self.live.clear()
        self._changes.is_list_changed = self._changes.is_status_changed = True

    def begin_reply(self, chat_id: str, message_id: str) -> None:
        """A reply was accepted; unless its end came in before the answer to the request did."""
        if message_id not in self._done_ids:
            self.live.setdefault(chat_id, LiveReply(chat_id, message_id))
            self._changes.is_list_changed = True

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event of the stream; unknown types are ignored."""
        self._check_sequence(event)
        if event.get("type") in CACHE_EVENTS:
            self.num_cache_changes += 1
        handler = getattr(self, f"_on_{event.get('type')}", None)
        if handler is not None:
            handler(event)

    def _check_sequence(self, event: Mapping[str, Any]) -> None:
        seq = event.get("seq")
        if not isinstance(seq, int):
            return
        if self._last_seq is not None and seq > self._last_seq + 1 and event.get("type") != "hello":
            self._changes.is_resync_due = True
        self._last_seq = seq

    def _follow_state(self, chat: ChatSummary) -> None:
        """An "idle" may be older than a reply that was begun since; what ends a known reply is its own end."""
        live = self.live.get(chat.id)
        if chat.state == "idle":
            if live is not None and not live.message_id:
                del self.live[chat.id]
        else:
            self.live.setdefault(chat.id, LiveReply(chat.id, phase=chat.state))

    def _on_hello(self, event: Mapping[str, Any]) -> None:
        self.is_connected = self.is_known = True
        self.trouble = ""
        self._changes.is_resync_due = True
        self._on_status(event)

    def _on_resync(self, event: Mapping[str, Any]) -> None:
        self._changes.is_resync_due = True

    def _on_status(self, event: Mapping[str, Any]) -> None:
        status = event.get("status")
        before = self.status
        self.status = ServiceStatus.from_json(status if isinstance(status, Mapping) else event)
        self.num_cache_changes += self.status != before
        self._changes.is_status_changed = True

    def _on_model(self, event: Mapping[str, Any]) -> None:
        self.status = replace(self.status, model=ModelState.from_json(event.get("model")))
        self._changes.is_status_changed = True

    def _on_chat_created(self, event: Mapping[str, Any]) -> None:
        self.put_chat(ChatSummary.from_json(event.get("chat") or {}))

    _on_chat_updated = _on_chat_created

    def _on_chat_deleted(self, event: Mapping[str, Any]) -> None:
        chat = event.get("chat") or {}
        self.drop_chat(str(chat.get("id") or event.get("chat_id")))

    def _on_message_added(self, event: Mapping[str, Any]) -> None:
        if self._is_open(event):
            self._changes.open_chat.append(MessageAdded(Message.from_json(event.get("message") or {})))

    def _on_reply_progress(self, event: Mapping[str, Any]) -> None:
        live = self._live(event)
        live.phase = str(event.get("phase") or live.phase)
        live.queue_position = int(event.get("queue_position") or 0)
        live.num_prompt_tokens = int(event.get("num_prompt_tokens") or 0)
        live.num_computed_tokens = int(event.get("num_computed_tokens") or 0)
        self._changes.is_list_changed = True

    def _on_reply_delta(self, event: Mapping[str, Any]) -> None:
        live = self._live(event)
        live.phase = "writing"
        live.tokens_per_s = float(event.get("tokens_per_s") or live.tokens_per_s)
        self._changes.is_list_changed = True
        if not self._is_open(event):
            return
        text, offset = str(event.get("text") or ""), event.get("offset")
        pending = self._changes.open_chat
        last = pending[-1] if pending else None
        if isinstance(last, TextAdded) and last.message_id == live.message_id:
            last.text += text
        else:
            pending.append(TextAdded(live.message_id, text, offset if isinstance(offset, int) else None))

    def _on_reply_done(self, event: Mapping[str, Any]) -> None:
        message = Message.from_json(event.get("message") or {})
        self._done_ids.append(message.id)
        self.live.pop(str(event.get("chat_id")), None)
        self._changes.is_list_changed = True
        if self._is_open(event):
            self._changes.open_chat.append(ReplyDone(message))

    def _on_job(self, event: Mapping[str, Any]) -> None:
        job = Job.from_json(event.get("job") or {})
        self.jobs[job.id] = job
        self._changes.are_jobs_changed = True

    def _is_open(self, event: Mapping[str, Any]) -> bool:
        return event.get("chat_id") == self.open_chat_id is not None

    def _live(self, event: Mapping[str, Any]) -> LiveReply:
        chat_id = str(event.get("chat_id"))
        live = self.live.setdefault(chat_id, LiveReply(chat_id))
        live.message_id = str(event.get("message_id") or live.message_id)
        return live
