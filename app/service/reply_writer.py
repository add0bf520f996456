"""A reply's way out of the engine: to everybody who watches, and to the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from chatkv.app.chats.errors import StoreBusyError, StoreFullError
from chatkv.app.chats.records import Message, MessageStatus
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.engine.request import RequestOutput

from .chats_thread import ChatsThread
from .errors import to_api_error
from .events import EventHub
from .live_reply import LiveReply
from .outputs import OutputStream

log = logging.getLogger(__name__)
FLUSH_S = 0.15
"""Text and ids go to the database at least this often; the promise is 0.25 s."""

_PASSING = (StoreFullError, StoreBusyError)


@dataclass(frozen=True, slots=True)
class _Unclosed:
    """A reply that has ended, but whose end the database would not take."""

    shown: dict[str, Any]
    """The message as everybody was told of it."""
    close: Callable[[ChatStore], Message]


class ReplyWriter:
    def __init__(self, chats: ChatsThread, events: EventHub, text_pool: Executor):
        self._chats = chats
        self._events = events
        self._text_pool = text_pool
        self._unclosed: dict[str, _Unclosed] = {}

    async def write(self, reply: LiveReply, stream: OutputStream) -> None:
        """Outputs to events at once, to the database every `FLUSH_S`; a slow disk holds up no event.

        Raises:
            UserError: a flush failed. What it was to write is put back.
        """
        flush: asyncio.Task[None] | None = None
        flushed_at = time.monotonic()
        try:
            while not stream.is_finished:
                outputs = await stream.next(_due_in(reply, flush, flushed_at))
                self._publish_outputs(reply, outputs, reply.take(outputs))
                if flush is not None and flush.done():
                    flush.result()
                    flush = None
                if flush is None and not reply.is_flushed and time.monotonic() - flushed_at >= FLUSH_S:
                    flushed_at = time.monotonic()
                    flush = asyncio.create_task(self._flush(reply, stream.model.text.tokenizer_hash))
        finally:
            if flush is not None:
                await asyncio.wait([flush])
        if flush is not None:
            flush.result()

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

        def close(store: ChatStore) -> Message:
            if not reply.is_flushed:
                store.append_reply(message_id, reply.unflushed_text, reply.unflushed_ids, tokenizer_hash)
                reply.take_unflushed()
            return store.finish_reply(message_id, status, stats, error, ids, tokenizer_hash)

        try:
            done = reply.with_reuse((await self._chats.run(close)).to_json())
        except Exception as refusal:
            log.warning("reply %s could not be closed", message_id, exc_info=not isinstance(refusal, UserError))
            reason = to_api_error(refusal).message
            done = reply.message_json() | {"status": MessageStatus.ERROR.value, "error": reason}
            if isinstance(refusal, _PASSING):  # All of it is still shown, with the reason, and written when it can be.
                self._unclosed[message_id] = _Unclosed(done, close)
        self._events.publish("reply_done", chat_id=reply.chat_id, message=done)

    async def close_again(self) -> None:
        """Write the ends of replies that could not be written before.

        Raises:
            StoreFullError, StoreBusyError: they still cannot.
        """
        for message_id, unclosed in list(self._unclosed.items()):
            try:
                await self._chats.run(unclosed.close)
            except _PASSING:
                raise
            except Exception as error:  # Its chat is gone, or another call was quicker.
                log.warning("reply %s is not closed any more: %s", message_id, error)
            self._unclosed.pop(message_id, None)

    def unclosed(self) -> dict[str, dict[str, Any]]:
        """By message id, what is newer in memory than in the database."""
        return {message_id: unclosed.shown for message_id, unclosed in self._unclosed.items()}

    async def _flush(self, reply: LiveReply, tokenizer_hash: str) -> None:
        text, ids = reply.take_unflushed()
        try:
            await self._chats.run(lambda store: store.append_reply(reply.message.id, text, ids, tokenizer_hash))
        except BaseException:
            reply.put_back(text, ids)
            raise

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


def _due_in(reply: LiveReply, flush: asyncio.Task[None] | None, flushed_at: float) -> float | None:
    """Seconds until the writer must look again, whatever comes."""
    if flush is not None:
        return FLUSH_S
    return None if reply.is_flushed else max(0.0, flushed_at + FLUSH_S - time.monotonic())
