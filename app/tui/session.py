"""One sitting: the service, the open conversation, and what the person does with it. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .board import Board, MessageAdded, OpenChatEvent, ReplyDone, TextAdded
from .drafts import Drafts
from .ports import ChatService, RefusedError
from .records import ChatSummary, Conversation, Message, OverflowChoice

OVERFLOW_CODE = "context_length_exceeded"
PASSING_CODES = frozenset({"chat_busy", "queue_full", "stopping"})
"""Refusals that pass by themselves: the turn waits in the queue."""


class ContextOverflowError(Exception):
    """The conversation does not fit the model's context; the person has to choose."""

    def __init__(self, text: str, error: RefusedError):
        super().__init__(error.message)
        self.text = text
        self.num_prompt_tokens = int(error.details.get("n_prompt_tokens") or 0)
        self.context_tokens = int(error.details.get("n_ctx") or 0)
        self.choices = [OverflowChoice.from_json(choice) for choice in error.details.get("choices") or ()]


class QueuedTurnRefusedError(Exception):
    """The service does not take a turn that waited."""

    def __init__(self, chat_id: str, text: str, refusal: RefusedError):
        super().__init__(refusal.message)
        self.chat_id = chat_id
        self.text = text
        self.refusal = refusal


@dataclass(frozen=True)
class Shown:
    """What the transcript has to do: the kind is append, extend, replace or reload."""

    kind: str
    index: int = -1
    text: str = ""


class Session:
    def __init__(self, service: ChatService, board: Board, drafts: Drafts):
        self.service = service
        self.board = board
        self.drafts = drafts
        self.conversation: Conversation | None = None
        self.messages: list[Message] = []
        self.queued: dict[str, list[str]] = {}
        """Sent by the person, not yet by us: the chat is busy, or no model is there. Also saved as the chat's draft."""
        self._creating = asyncio.Lock()

    # Which chat is open

    @property
    def chat_id(self) -> str | None:
        return self.conversation.summary.id if self.conversation else None

    @property
    def summary(self) -> ChatSummary | None:
        """The open chat as the list knows it now."""
        opened = self.conversation.summary if self.conversation else None
        return self.board.chats.get(opened.id, opened) if opened else None

    @property
    def is_busy(self) -> bool:
        return self.chat_id in self.board.live

    @property
    def last_reply(self) -> Message | None:
        return next((message for message in reversed(self.messages) if message.is_reply), None)

    def begin_new(self) -> None:
        """An empty conversation; the service hears of it when there is something to keep."""
        self.conversation, self.messages, self.board.open_chat_id = None, [], None

    async def open_chat(self, chat_id: str) -> None:
        self.board.open_chat_id = chat_id
        self._take_conversation(Conversation.from_json(await self.service.get_chat(chat_id)))

    async def refresh(self) -> None:
        """Fetch the list and the open chat again."""
        chats = [ChatSummary.from_json(chat) for chat in await self.service.list_chats()]
        self.board.set_chats(chats)
        if self.chat_id is not None:
            await self.open_chat(self.chat_id)

    async def ensure_chat(self) -> str:
        """The open chat's id; makes the chat if it is new."""
        async with self._creating:
            if self.conversation is None:
                chat = await self.service.create_chat()
                self._take_conversation(Conversation.from_json({"chat": chat}))
                assert self.conversation is not None
                self.board.open_chat_id = self.chat_id
                self.board.put_chat(self.conversation.summary)
            assert self.chat_id is not None
            return self.chat_id

    def apply(self, event: OpenChatEvent) -> Shown | None:
        """Bring `messages` up to date with one event of the open chat; says what to redraw."""
        if isinstance(event, MessageAdded):
            return self._add(event.message)
        message_id = event.message_id if isinstance(event, TextAdded) else event.message.id
        index = self._index(message_id)
        if index is None:
            return Shown("reload")
        if isinstance(event, ReplyDone):
            self.messages[index] = event.message
            return Shown("replace", index)
        return self._extend(index, event)

    # Talking

    async def send(self, text: str, **place: str | None) -> bool:
        """Send a turn, or queue it when it has to wait; False when it was queued.

        `parent_id=` puts the turn elsewhere in the tree (an edit; None is the root); without it, it follows the tip.

        Raises:
            ContextOverflowError: it does not fit; nothing was changed.
        """
        chat_id = await self.ensure_chat()
        if not place and (self.is_busy or self.board.status.model.state in ("no_model", "failed")):
            self._queue(chat_id, text)
            return False
        try:
            answer = await self.service.send_turn(chat_id, text, **place)
        except RefusedError as error:
            if error.code == OVERFLOW_CODE:
                raise ContextOverflowError(text, error) from error
            if self._is_passing(error):
                self._queue(chat_id, text)
                return False
            raise
        self.drafts.put(chat_id, "")
        if place or not self._take_turn(chat_id, answer):
            await self._reload_if_open(chat_id)
        return True

    async def flush_queue(self) -> list[str]:
        """Send what waits, one turn a chat; returns the chats that were served. Called when something changed.

        Raises:
            QueuedTurnRefusedError: a turn will never be taken as it is; it left the queue.
        """
        if not self.board.is_connected or self.board.status.model.state != "ready":
            return []
        served = []
        for chat_id, texts in list(self.queued.items()):
            if chat_id in self.board.live or not texts:
                continue
            try:
                answer = await self.service.send_turn(chat_id, texts[0])
            except RefusedError as error:
                if self._is_passing(error):
                    continue
                self.queued[chat_id] = texts[1:]
                raise QueuedTurnRefusedError(chat_id, texts[0], error) from error
            self.queued[chat_id] = texts[1:]
            self.save_draft(chat_id, "")
            if not self._take_turn(chat_id, answer):
                await self._reload_if_open(chat_id)
            served.append(chat_id)
        self.queued = {chat_id: texts for chat_id, texts in self.queued.items() if texts}
        return served

    def take_back_queued(self) -> str | None:
        """The newest waiting turn of the open chat, back for editing."""
        texts = self.queued.get(self.chat_id or "")
        if not texts:
            return None
        text = texts.pop()
        if not texts:
            del self.queued[self.chat_id or ""]
        return text

    def save_draft(self, chat_id: str | None, composed: str) -> None:
        """Remember what stands in the composer (and waits in the queue) of a chat; written by `drafts.flush`."""
        waiting = self.queued.get(chat_id or "", [])
        self.drafts.put(chat_id, "\n\n".join([*waiting, composed] if composed else waiting))

    async def stop(self) -> None:
        if self.chat_id is not None:
            await self.service.cancel(self.chat_id)

    async def regenerate(self, message: Message | None = None) -> None:
        reply = message or self.last_reply
        if self.chat_id is not None and reply is not None:
            await self._tree_action(lambda chat_id: self.service.regenerate(chat_id, reply.id))

    async def continue_reply(self) -> None:
        if self.chat_id is not None:
            await self._tree_action(self.service.continue_reply)

    async def edit(self, message: Message, text: str) -> bool:
        """Say it differently: a sibling of `message`; the old branch stays."""
        return await self.send(text, parent_id=message.parent_id)

    async def switch_branch(self, message: Message, step: int) -> bool:
        siblings = self.siblings(message)
        position = siblings.index(message.id) + step if message.id in siblings else -1
        if self.conversation is None or not 0 <= position < len(siblings):
            return False
        await self.update_chat({"tip_id": siblings[position]})
        return True

    async def fork(self, message: Message) -> str:
        assert self.chat_id is not None
        return ChatSummary.from_json(await self.service.fork_chat(self.chat_id, message.id)).id

    def siblings(self, message: Message) -> tuple[str, ...]:
        return self.conversation.siblings.get(message.id, ()) if self.conversation else ()

    async def update_chat(self, fields: Mapping[str, Any]) -> None:
        """Change the open chat (made first, if it is new)."""
        chat_id = await self.ensure_chat()
        await self.service.update_chat(chat_id, fields)
        await self._reload_if_open(chat_id)

    # Inside

    def _is_passing(self, error: RefusedError) -> bool:
        is_without_model = self.board.status.model.state != "ready" and error.code == "model_not_found"
        return error.code in PASSING_CODES or is_without_model

    def _take_conversation(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.messages = list(conversation.messages)

    async def _reload_if_open(self, chat_id: str) -> None:
        if chat_id == self.chat_id:
            await self.open_chat(chat_id)

    async def _tree_action(self, action: Callable[[str], Any]) -> None:
        assert self.chat_id is not None
        chat_id = self.chat_id
        await action(chat_id)
        await self._reload_if_open(chat_id)

    def _take_turn(self, chat_id: str, answer: Mapping[str, Any]) -> bool:
        """Show the two new messages without waiting for their events; False if they do not fit what is shown."""
        reply = answer.get("reply")
        if isinstance(reply, Mapping):
            self.board.begin_reply(chat_id, str(reply.get("id")))
        if chat_id != self.chat_id:
            return True
        for part in (answer.get("message"), reply):
            if isinstance(part, Mapping):
                shown = self._add(Message.from_json(part))
                if shown is not None and shown.kind == "reload":
                    return False
        return True

    def _index(self, message_id: str) -> int | None:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].id == message_id:
                return index
        return None

    def _add(self, message: Message) -> Shown | None:
        if self._index(message.id) is not None:
            return None
        tip = self.messages[-1].id if self.messages else None
        if message.parent_id != tip:
            return Shown("reload")
        self.messages.append(message)
        return Shown("append", len(self.messages) - 1)

    def _extend(self, index: int, event: TextAdded) -> Shown | None:
        message, text = self.messages[index], event.text
        if event.offset is not None:
            if event.offset > message.num_source_chars:
                return Shown("reload")
            text = text[message.num_source_chars - event.offset :]
        if not text:
            return None
        self.messages[index] = extended = message.extended(text)
        return Shown("extend", index, extended.content[len(message.content) :])

    def _queue(self, chat_id: str, text: str) -> None:
        self.queued.setdefault(chat_id, []).append(text)
        self.save_draft(chat_id, "")
