"""A reply's way out of the engine: to everybody who watches, and to the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from chatkv.app.chats.records import MessageStatus
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.engine.request import RequestOutput

from .chats_thread import ChatsThread
from .events import EventHub
from .live_reply import LiveReply
from .outputs import OutputStream

log = logging.getLogger(__name__)
FLUSH_S = 0.15
"""Text and ids go to the database at least this often; the promise is 0.25 s."""


class ReplyWriter:
    def __init__(self, chats: ChatsThread, events: EventHub, text_pool: Executor):
        self._chats = chats
        self._events = events
        self._text_pool = text_pool

    async def write(self, reply: LiveReply, stream: OutputStream) -> None:
        """Outputs to events at once, to the database every `FLUSH_S`."""
        tokenizer_hash = stream.model.text.tokenizer_hash
        text, flushed_at = "", time.monotonic()
        ids: list[int] = []
        while not stream.is_finished:
            has_more = bool(text or ids)
            due_in = max(0.0, flushed_at + FLUSH_S - time.monotonic()) if has_more else None
            outputs = await stream.next(due_in)
            new_text, new_ids = reply.take(outputs)
            text, ids = text + new_text, ids + new_ids
            self._publish_outputs(reply, outputs, new_text)
            if (text or ids) and (time.monotonic() - flushed_at >= FLUSH_S or stream.is_finished):
                flush = partial(_append, reply.message.id, text, ids, tokenizer_hash)
                text, ids, flushed_at = "", [], time.monotonic()
                await self._chats.run(flush)

    async def finish(self, reply: LiveReply, status: MessageStatus, error: str | None) -> None:
        """Close the reply in the database, whatever ended it, and tell everybody."""
        ids: tuple[int, ...] | None = None
        tokenizer_hash: str | None = None
        stream = reply.stream
        if stream is not None:
            stream.close()
            tokenizer_hash = stream.model.text.tokenizer_hash
            cut = stream.model.text.answer_ids
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._text_pool, cut, tuple(reply.token_ids), reply.content)
        message_id, stats = reply.message.id, reply.stats() if stream else None
        try:
            message = await self._chats.run(
                lambda store: store.finish_reply(message_id, status, stats, error, ids, tokenizer_hash)
            )
            done = message.to_json()
        except UserError as refusal:
            # No space: what was flushed is safe, and the person still sees all of it, with the reason.
            log.warning("reply %s could not be closed: %s", message_id, refusal.message)
            done = reply.message_json() | {"status": MessageStatus.ERROR.value, "error": refusal.message}
        self._events.publish("reply_done", chat_id=reply.chat_id, message=done)

    def _publish_outputs(self, reply: LiveReply, outputs: Sequence[RequestOutput], text: str) -> None:
        if text:
            self._events.publish(
                "reply_delta",
                chat_id=reply.chat_id,
                message_id=reply.message.id,
                offset=len(reply.content) - len(text),
                text=text,
                num_tokens=len(reply.token_ids),
                tokens_per_s=reply.tokens_per_s,
            )
        elif any(output.progress is not None for output in outputs):
            self.publish_progress(reply)

    def publish_progress(self, reply: LiveReply) -> None:
        self._events.publish("reply_progress", **reply.progress_event())


def _append(message_id: str, text: str, ids: list[int], tokenizer_hash: str, store: ChatStore) -> None:
    store.append_reply(message_id, text, ids, tokenizer_hash)
