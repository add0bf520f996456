"""Writing replies in chats: several at once, whoever looks on; nothing that was shown is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from typing import Any

from chatkv.app.chats.errors import ChatStateError
from chatkv.app.chats.records import Chat, ChatSummary, Message, MessageStatus, Role
from chatkv.app.errors import UserError
from chatkv.engine.errors import EngineError
from chatkv.engine.request import GenerationRequest, Priority

from .chat_prompt import Prompt, PromptMaker, chat_sampling
from .chats_thread import ChatsThread
from .errors import ApiError, to_api_error
from .events import EventHub
from .generations import Generations
from .live_reply import STATUS_OF_REASON, LiveReply
from .model_manager import ModelManager
from .outputs import OutputStream, new_request_id
from .owners import Owners
from .reply_writer import ReplyWriter
from .reuse import RequestLog
from .warming import Warmer

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class Replies:
    """At most one reply per chat is written at a time. Lives on the event loop."""

    def __init__(
        self,
        chats: ChatsThread,
        models: ModelManager,
        generations: Generations,
        events: EventHub,
        prompts: PromptMaker,
        text_pool: Executor,
        owners: Owners,
        warmer: Warmer,
        requests: RequestLog,
    ):
        self._chats = chats
        self._models = models
        self._generations = generations
        self._events = events
        self._prompts = prompts
        self._writer = ReplyWriter(chats, events, text_pool)
        self._owners = owners
        self._warmer = warmer
        self._requests = requests
        self._live: dict[str, LiveReply] = {}
        self._claimed: set[str] = set()
        self._is_stopping = False

    def live(self, chat_id: str) -> LiveReply | None:
        return self._live.get(chat_id)

    def newest(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as read from the database, and in memory where that is newer."""
        newer = self._writer.unclosed() | {live.message.id: live.message_json() for live in self._live.values()}
        return [newer.get(message["id"], message) | {"chat_id": message["chat_id"]} for message in messages]

    def state(self, chat_id: str) -> str:
        reply = self._live.get(chat_id)
        return reply.phase if reply else "waiting" if chat_id in self._claimed else "idle"

    async def start_turn(
        self, chat_id: str, text: str, parent_id: str | None = None, is_root: bool = False
    ) -> tuple[Message, Message]:
        """Commit the person's message (after `parent_id`, the tip, or as a new beginning) and begin the reply to it.

        When the model is ready, the prompt is checked first; one that does not fit is refused with ways out, and the
        text stays as the chat's draft. While the model is still loading the message is committed at once.

        Raises:
            ApiError, UserError, EngineError: nothing was added to the chat; the draft holds the text.
        """
        self._claim(chat_id)
        prompt: Prompt | None = None
        try:
            await self._writer.close_again()
            chat = await self._chats.run(lambda store: store.get_chat(chat_id))
            tip_id = None if is_root else parent_id or chat.tip_id
            chat_sampling(chat.settings, None)
            installed = self._models.resolve(chat.model)
            if self._models.is_ready(chat.model):
                prompt = await self._prompts.prepare(chat, tip_id, text=text)
            user, reply = await self._chats.run(lambda store: store.begin_turn(chat_id, tip_id, text, installed.name))
        except BaseException as error:
            self._unclaim(chat_id, prompt)
            if isinstance(error, ApiError | UserError | EngineError):
                await self._keep_draft(chat_id, text)
            raise
        self._events.publish("message_added", chat_id=chat_id, message=user.to_json())
        self._launch(chat, reply, prompt)
        return user, reply

    async def regenerate(self, chat_id: str, message_id: str | None) -> Message:
        """Another version of a reply (default: the last one), or a reply to a message that has none."""
        self._claim(chat_id)
        prompt: Prompt | None = None
        try:
            await self._writer.close_again()
            chat = await self._chats.run(lambda store: store.get_chat(chat_id))
            at_id = message_id or chat.tip_id
            if at_id is None:
                raise ChatStateError("The chat is empty.", "Send a message first.")
            at = await self._chats.run(lambda store: store.get_message(at_id, chat_id))
            parent_id = at.parent_id if at.role is Role.ASSISTANT else at.id
            if parent_id is None:
                raise ChatStateError("There is no message before this reply.", "Send a message first.")
            versions = await self._chats.run(lambda store: store.children(parent_id, chat_id))
            installed = self._models.resolve(chat.model)
            if self._models.is_ready(chat.model):
                prompt = await self._prompts.prepare(chat, parent_id)
            reply = await self._chats.run(lambda store: store.begin_reply(chat_id, parent_id, installed.name))
        except BaseException:
            self._unclaim(chat_id, prompt)
            raise
        self._launch(chat, reply, prompt, num_siblings=len(versions))
        return reply

    async def continue_reply(self, chat_id: str) -> Message:
        """Go on with the last reply, after its exact ids."""
        self._claim(chat_id)
        prompt: Prompt | None = None
        try:
            await self._writer.close_again()
            chat = await self._chats.run(lambda store: store.get_chat(chat_id))
            tip_id = chat.tip_id
            tip = await self._chats.run(lambda store: store.get_message(tip_id, chat_id)) if tip_id else None
            if tip is None or tip.role is not Role.ASSISTANT:
                raise ChatStateError("The chat does not end with a reply.", "Regenerate makes one.")
            if tip.status is MessageStatus.COMPLETE:
                raise ChatStateError("The reply is complete.", "Send a message, or regenerate it.")
            self._models.resolve(chat.model)
            if self._models.is_ready(chat.model) and tip.content:
                prompt = await self._prompts.prepare(chat, tip.id, is_continued=True)
            reply = await self._chats.run(lambda store: store.reopen_reply(tip.id, chat_id))
        except BaseException:
            self._unclaim(chat_id, prompt)
            raise
        self._launch(chat, reply, prompt)
        return reply

    def stop(self, chat_id: str) -> bool:
        """False: nothing is being written there."""
        reply = self._live.get(chat_id)
        if reply is not None:
            reply.stop()
        return reply is not None

    async def stop_and_wait(self, chat_id: str) -> None:
        reply = self._live.get(chat_id)
        if reply is not None and reply.task is not None:
            reply.stop()
            await asyncio.wait([reply.task])

    async def stop_all(self) -> None:
        """All replies end as "stopped", with everything they hold in the database."""
        self._is_stopping = True
        tasks = [reply.task for reply in self._live.values() if reply.task is not None]
        for reply in self._live.values():
            reply.stop()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(UserError):
            await self._writer.close_again()

    def _claim(self, chat_id: str) -> None:
        if self._is_stopping:
            raise ApiError(503, "The service is stopping.", "stopping")
        if chat_id in self._live or chat_id in self._claimed:
            raise ApiError(409, "A reply is being written in this chat. Wait for it, or stop it.", "chat_busy")
        self._claimed.add(chat_id)
        self._warmer.cancel(chat_id)

    def _unclaim(self, chat_id: str, prompt: Prompt | None) -> None:
        self._claimed.discard(chat_id)
        if prompt is not None:
            self._models.release()

    async def _keep_draft(self, chat_id: str, text: str) -> None:
        try:
            await self._chats.run(lambda store: store.update_chat(chat_id, draft=text))
        except UserError as error:
            log.warning("the draft of a refused message could not be kept: %s", error.message)

    def _launch(self, chat: Chat, message: Message, prompt: Prompt | None, num_siblings: int = 0) -> None:
        reply = LiveReply(message, message.content, [])
        self._claimed.discard(chat.id)
        self._live[chat.id] = reply
        self._events.publish("message_added", chat_id=chat.id, message=reply.message_json())
        self._writer.publish_progress(reply)
        reply.task = asyncio.get_running_loop().create_task(self._run(chat, reply, prompt, num_siblings))

    async def _run(self, chat: Chat, reply: LiveReply, prompt: Prompt | None, num_siblings: int) -> None:
        status, error_text = MessageStatus.STOPPED, None
        try:
            shown = await self._announce(chat.id)
            reply.num_earlier_tokens = shown.num_tokens if shown is not None else None
            if prompt is None:
                prompt = await self._prepare_later(chat, reply)
            await self._note_continued_ids(reply, prompt)
            reply.stream = await self._start(chat, reply, prompt, num_siblings)
            if reply.is_stop_wanted:
                reply.stream.cancel()
            await self._writer.write(reply, reply.stream)
            status = STATUS_OF_REASON[reply.finish_reason] if reply.finish_reason else MessageStatus.STOPPED
            error_text = reply.error
        except asyncio.CancelledError:
            if not reply.is_stop_wanted:
                raise
        except Exception as error:
            status = MessageStatus.ERROR
            refusal = to_api_error(error)
            error_text = refusal.message
            if refusal.status >= 500:
                log.exception("reply %s failed", reply.message.id)
        finally:
            self._note_reuse(reply)
            try:
                # Before the reply is told to be done: from then on the chat takes the next message.
                await self._note_chain(reply)
            finally:
                try:
                    await self._writer.finish(reply, status, error_text)
                finally:
                    if not self._is_stopping and status in (MessageStatus.COMPLETE, MessageStatus.LENGTH):
                        self._warmer.after_turn(chat.id)
                    self._live.pop(chat.id, None)
            await self._announce(chat.id)

    async def _note_continued_ids(self, reply: LiveReply, prompt: Prompt) -> None:
        """What is sampled now follows these ids, in the database too, where more may stand than the text shows."""
        reply.token_ids = list(prompt.answer_ids)
        if not reply.token_ids:
            return
        message_id, tokenizer_hash = reply.message.id, prompt.model.text.tokenizer_hash
        try:
            await self._chats.run(lambda store: store.set_token_ids(message_id, tokenizer_hash, prompt.answer_ids))
        except BaseException:
            self._models.release()
            raise

    async def _prepare_later(self, chat: Chat, reply: LiveReply) -> Prompt:
        """The prompt, once the model is ready; `reply.stop()` ends the wait."""
        is_continued = bool(reply.content)
        tip_id = reply.message.id if is_continued else reply.message.parent_id
        reply.preparing = asyncio.ensure_future(self._prompts.prepare(chat, tip_id, is_continued=is_continued))
        if reply.is_stop_wanted:
            reply.preparing.cancel()
        return await reply.preparing

    async def _start(self, chat: Chat, reply: LiveReply, prompt: Prompt, num_siblings: int) -> OutputStream:
        try:
            request = GenerationRequest(
                request_id=new_request_id("reply"),
                prompt_token_ids=prompt.token_ids,
                sampling=chat_sampling(chat.settings, prompt.model, num_siblings),
                priority=Priority.INTERACTIVE,
                is_transient=chat.is_private,
                owner=chat.id,
                resume_text=reply.content,
            )
        except BaseException:
            self._models.release()
            raise
        return await self._generations.start(prompt.model, request)

    def _note_reuse(self, reply: LiveReply) -> None:
        if (stream := reply.stream) is not None and (facts := reply.prompt_facts) is not None:
            token_ids = stream.request.prompt_token_ids
            reply.reuse = self._requests.note(stream.model, token_ids, facts, reply.chat_id, reply.num_earlier_tokens)

    async def _note_chain(self, reply: LiveReply) -> None:
        if (stream := reply.stream) is not None and reply.block_hashes:
            num_tokens = len(stream.request.prompt_token_ids) + reply.num_new_tokens
            await self._owners.note(reply.chat_id, stream.model.fingerprint, num_tokens, reply.block_hashes)

    async def _announce(self, chat_id: str) -> Chat | None:
        """The chat's line in everybody's list. None: it is gone."""
        try:
            chat = await self._chats.run(lambda store: store.get_chat(chat_id))
        except UserError:
            return None
        self._events.publish("chat_updated", chat=ChatSummary.to_json(chat, self.state(chat_id)))
        return chat
