"""One sitting: the service, the open conversation, and what the person does with it. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from chatkv.app.client.tip import TIP, Tip

from .board import Board, OpenChatEvent
from .cache_watch import CacheWatch
from .drafts import Drafts, is_new, is_new_private, new_chat_key
from .ports import ChatService, RefusedError
from .records import ChatSummary, Conversation, Message, OverflowChoice
from .refusals import OVERFLOW_CODE, PASSING_CODES, ContextOverflowError, QueuedTurnRefusedError
from .thread import Shown, Thread


class Session:
    def __init__(self, service: ChatService, board: Board, drafts: Drafts):
        self.service = service
        self.board = board
        self.drafts = drafts
        self.cache = CacheWatch(service, board)
        self.conversation: Conversation | None = None
        self.thread = Thread()
        self.queued: dict[str, list[str]] = {}
        """Sent by the person, not yet by us: the chat is busy, or no model is there. Also saved as the chat's draft."""
        self._new_key = new_chat_key()
        self._made: dict[str, str] = {}
        """Ids of the chats that were made for the keys of new ones."""
        self._making = asyncio.Lock()

    # Which chat is open

    @property
    def chat_id(self) -> str | None:
        return self.conversation.summary.id if self.conversation else None

    @property
    def chat_key(self) -> str:
        """The open chat's id, or the key of a new one: what was said there goes there, whatever is open by then."""
        return self.chat_id or self._new_key

    @property
    def summary(self) -> ChatSummary | None:
        """The open chat as the list knows it now."""
        opened = self.conversation.summary if self.conversation else None
        return self.board.chats.get(opened.id, opened) if opened else None

    @property
    def is_private(self) -> bool:
        """Whether nothing of the open chat is kept."""
        return self.summary.is_private if self.summary else is_new_private(self._new_key)

    @property
    def messages(self) -> list[Message]:
        return self.thread.messages

    @property
    def is_busy(self) -> bool:
        return self.chat_id in self.board.live

    @property
    def waiting(self) -> list[str]:
        """What waits to be sent in the open chat."""
        return self.queued.get(self.chat_key, [])

    def begin_new(self, key: str | None = None, *, is_private: bool = False) -> None:
        """An empty conversation; the service hears of it when there is something to keep."""
        self._new_key = key or new_chat_key(is_private)
        self.conversation, self.thread, self.board.open_chat_id = None, Thread(), None

    async def open_chat(self, chat_id: str) -> bool:
        """False when another chat was asked for before this one came."""
        self.board.open_chat_id = chat_id
        try:
            await self.reload()
        except Exception:
            if self.board.open_chat_id == chat_id:
                self.board.open_chat_id = self.chat_id
            raise
        return self.chat_id == chat_id

    async def reload(self) -> None:
        """Fetch the chat that is open or was asked for last."""
        chat_id = self.board.open_chat_id
        if chat_id is None:
            return
        conversation = Conversation.from_json(await self.service.get_chat(chat_id))
        if self.board.open_chat_id == chat_id:
            self._take_conversation(conversation)

    async def refresh(self) -> None:
        """Fetch the list and the open chat again."""
        chats = [ChatSummary.from_json(chat) for chat in await self.service.list_chats()]
        self.board.set_chats(chats)
        await self.reload()

    def made_from(self, key: str) -> str | None:
        """Id of the chat that a new one with this key became."""
        return self._made.get(key)

    async def ensure_chat(self, key: str | None = None) -> str:
        """Id of the chat with this key (None: the open one); makes the chat if it is new."""
        key = key or self.chat_key
        if not is_new(key):
            return key
        async with self._making:
            if key not in self._made:
                chat = await self.service.create_chat(private=is_new_private(key))
                conversation = Conversation.from_json({"chat": chat})
                self._made[key] = conversation.summary.id
                self.board.put_chat(conversation.summary)
                if self.chat_key == key and self.board.open_chat_id is None:
                    self.board.open_chat_id = conversation.summary.id
                    self._take_conversation(conversation)
            return self._made[key]

    def apply(self, event: OpenChatEvent) -> Shown | None:
        """Bring `messages` up to date with one event of the open chat; says what to redraw."""
        return self.thread.apply(event)

    # Talking

    async def send(self, text: str, key: str | None = None, parent_id: str | Tip | None = TIP) -> bool:
        """Send a turn to the chat with this key (None: the open one); False when it has to wait, and was queued.

        `parent_id` puts the turn elsewhere in the tree (an edit; None is the root).

        Raises:
            ContextOverflowError: it does not fit; nothing was changed.
        """
        chat_id = await self.ensure_chat(key)
        is_edit = parent_id is not TIP
        if not is_edit and (chat_id in self.board.live or self.board.status.model.state in ("no_model", "failed")):
            self._queue(chat_id, text)
            return False
        try:
            answer = await self.service.send_turn(chat_id, text, parent_id)
        except RefusedError as error:
            if error.code == OVERFLOW_CODE:
                raise ContextOverflowError(error) from error
            if self._is_passing(error):
                self._queue(chat_id, text)
                return False
            raise
        self.drafts.put(chat_id, "")
        if is_edit or not self._take_turn(chat_id, answer):
            await self._reload_if_open(chat_id)
        return True

    async def flush_queue(self) -> list[str]:
        """Send what waits, one turn a chat; returns the chats that were served. Called when something changed.

        Raises:
            QueuedTurnRefusedError: a turn will never be taken as it is; it left the queue.
        """
        if not self.board.is_connected or self.board.status.model.state not in ("ready", "unloaded"):
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
        if not self.waiting:
            return None
        text = self.waiting.pop()
        if not self.waiting:
            del self.queued[self.chat_key]
        return text

    def save_draft(self, key: str, composed: str) -> None:
        """Remember what stands in the composer (and waits in the queue) of a chat; written by `drafts.flush`."""
        waiting = self.queued.get(key, [])
        text = "\n\n".join([*waiting, composed] if composed else waiting)
        chat = self.board.chats.get(key)
        self.drafts.put(key, text, is_private=chat.is_private if chat else is_new_private(key))

    async def write_draft(self, key: str, text: str) -> None:
        """Give a draft to the service, in a chat made for it if it is a new one's."""
        await self.service.update_chat(await self.ensure_chat(key), {"draft": text})

    async def stop(self) -> None:
        if self.chat_id is not None:
            await self.service.cancel(self.chat_id)

    async def make_room(self, choice: OverflowChoice) -> None:
        """Leave the oldest turns out, here or in a fork that is open then."""
        if choice.kind == "fork" and self.messages:
            await self.open_chat(await self.fork(self.messages[-1]))
        await self.update_chat({"context_start_id": choice.context_start_id})

    async def regenerate(self, message: Message | None = None) -> None:
        """Write another version of a reply (None: the last one). Raises `ContextOverflowError`."""
        reply = message or self.thread.last_reply
        if self.chat_id is not None and reply is not None:
            await self._tree_action(lambda chat_id: self.service.regenerate(chat_id, reply.id))

    async def continue_reply(self) -> None:
        """Go on with the last reply. Raises `ContextOverflowError`."""
        if self.chat_id is not None:
            await self._tree_action(self.service.continue_reply)

    async def edit(self, message: Message, text: str, key: str | None = None) -> bool:
        """Say it differently: a sibling of `message`; the old branch stays."""
        return await self.send(text, key, message.parent_id)

    async def switch_branch(self, message: Message, step: int) -> str | None:
        """Id of the sibling that is shown now; None when there is none on that side."""
        siblings = self.siblings(message)
        position = siblings.index(message.id) + step if message.id in siblings else -1
        if not 0 <= position < len(siblings):
            return None
        await self.show_branch(siblings[position])
        return siblings[position]

    async def show_branch(self, message_id: str) -> None:
        """Open the branch of this chat that holds a message, to its newest end."""
        await self.update_chat({"tip_id": message_id})

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
        self.conversation, self.thread = conversation, Thread(conversation.messages)

    async def _reload_if_open(self, chat_id: str) -> None:
        if chat_id == self.chat_id:
            await self.reload()

    async def _tree_action(self, action: Callable[[str], Awaitable[object]]) -> None:
        assert self.chat_id is not None
        chat_id = self.chat_id
        try:
            await action(chat_id)
        except RefusedError as error:
            if error.code == OVERFLOW_CODE:
                raise ContextOverflowError(error) from error
            raise
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
                shown = self.thread.add(Message.from_json(part))
                if shown is not None and shown.kind == "reload":
                    return False
        return True

    def _queue(self, chat_id: str, text: str) -> None:
        self.queued.setdefault(chat_id, []).append(text)
        self.save_draft(chat_id, "")
