"""One reply that is being written: what it holds so far, and the figures shown beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatkv.app.chats.records import Message, MessageStatus, ReplyStats
from chatkv.engine.request import FinishReason, Progress, RequestOutput, RequestStatus

from .outputs import OutputStream
from .reuse import without_others

STATUS_OF_REASON = {
    FinishReason.STOP: MessageStatus.COMPLETE,
    FinishReason.LENGTH: MessageStatus.LENGTH,
    FinishReason.CANCELLED: MessageStatus.STOPPED,
    FinishReason.ERROR: MessageStatus.ERROR,
}


@dataclass(slots=True)
class LiveReply:
    """Lives on the event loop."""

    message: Message
    """As it was begun or reopened; `content` below is what it holds now."""
    content: str
    token_ids: list[int]
    """Of the whole reply, as sampled; the part from before a continuation is cut to what was visible."""
    unflushed_text: str = ""
    """The end of `content` that the database has not confirmed."""
    unflushed_ids: list[int] = field(default_factory=list)
    phase: str = "waiting"
    """waiting, reading or writing."""
    stream: OutputStream | None = None
    task: asyncio.Task[None] | None = None
    preparing: asyncio.Task[Any] | None = None
    is_stop_wanted: bool = False
    progress: Progress | None = None
    num_new_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    started_at: float = field(default_factory=time.monotonic)
    waited_until: float = field(default_factory=time.monotonic)
    """When it left the queue, as far as is known."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_earlier_tokens: int | None = None
    """Of the chat before this request, as far as they were counted."""
    prompt_facts: RequestOutput | None = None
    """The newest output that told of the prompt."""
    block_hashes: tuple[bytes, ...] = ()
    """Of the full blocks of prompt and answer, once it has ended."""
    reuse: Mapping[str, Any] | None = None
    """What the prompt found in the cache, once it has ended; see `reuse_json`."""

    @property
    def chat_id(self) -> str:
        return self.message.chat_id

    @property
    def tokens_per_s(self) -> float | None:
        """Of the decode: the first token belongs to the prompt's reading."""
        if self.first_token_at is None or self.last_token_at is None or self.num_new_tokens < 2:
            return None
        seconds = self.last_token_at - self.first_token_at
        return round((self.num_new_tokens - 1) / seconds, 2) if seconds > 0 else None

    def stop(self) -> None:
        """Ask it to end; what it holds is kept."""
        self.is_stop_wanted = True
        if self.stream is not None:
            self.stream.cancel()
        elif self.preparing is not None:
            self.preparing.cancel()

    @property
    def is_flushed(self) -> bool:
        return not (self.unflushed_text or self.unflushed_ids)

    def take_unflushed(self) -> tuple[str, list[int]]:
        taken = self.unflushed_text, self.unflushed_ids
        self.unflushed_text, self.unflushed_ids = "", []
        return taken

    def put_back(self, text: str, ids: list[int]) -> None:
        """What was taken could not be written."""
        self.unflushed_text, self.unflushed_ids = text + self.unflushed_text, ids + self.unflushed_ids

    def take(self, outputs: Sequence[RequestOutput]) -> str:
        """Take outputs in; the text that they brought."""
        text = "".join(output.text for output in outputs)
        ids = [token_id for output in outputs for token_id in output.token_ids]
        now = time.monotonic()
        for output in outputs:
            if output.progress is not None:
                self._take_progress(output.progress, now)
            if output.num_prompt_tokens:
                self.prompt_facts = output
            if output.finish_reason is not None:
                self.finish_reason, self.error = output.finish_reason, output.error
                self.block_hashes = output.block_hashes
        if ids:
            self.phase = "writing"
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        self.content += text
        self.token_ids += ids
        self.unflushed_text += text
        self.unflushed_ids += ids
        self.num_new_tokens += len(ids)
        return text

    def stats(self) -> ReplyStats:
        facts = self.prompt_facts
        first = self.first_token_at
        return ReplyStats(
            num_prompt_tokens=facts.num_prompt_tokens if facts else 0,
            num_cached_tokens=facts.num_cached_tokens if facts else 0,
            cached_by_tier=dict(facts.cached_by_tier) if facts else {},
            ttft_s=round(first - self.started_at, 4) if first else None,
            tokens_per_s=self.tokens_per_s,
            num_tokens=self.num_new_tokens,
            prefill_s=round(first - self.waited_until, 4) if first else None,
            chatkv=without_others(self.reuse) if self.reuse else None,
        )

    def progress_event(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "chat_id": self.chat_id,
            "message_id": self.message.id,
            "phase": self.phase,
            "queue_position": progress.queue_position if progress else None,
            "num_prompt_tokens": progress.num_prompt_tokens if progress else None,
            "num_computed_tokens": progress.num_computed_tokens if progress else None,
        }

    def message_json(self) -> dict[str, Any]:
        """As a message of a chat, with all that was made so far, flushed or not."""
        return self.message.to_json() | {
            "content": self.content,
            "status": MessageStatus.INCOMPLETE.value,
            "num_tokens": len(self.token_ids),
            "stats": self.stats().to_json(),
        }

    def with_reuse(self, message: dict[str, Any]) -> dict[str, Any]:
        """The ended message for those who watch now: with both sides of a miss, of which the database keeps one."""
        return message | {"stats": message["stats"] | {"chatkv": self.reuse}} if self.reuse else message

    def _take_progress(self, progress: Progress, now: float) -> None:
        self.progress = progress
        if progress.status is RequestStatus.RUNNING:
            self.phase = "reading"
        else:
            self.phase = "waiting"
            self.waited_until = now
