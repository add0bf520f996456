"""Warm before asked: blocks of a chat that is opened, of a draft that is typed, of the turn that will come next.

A warm request never loads a model, holds no lease, is no activity, and gives way to everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from chatkv.app.chats.records import Chat
from chatkv.app.errors import UserError
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.errors import EngineError
from chatkv.engine.request import FinishReason, GenerationRequest, Priority, RequestOutput, SamplingParams, WarmMode

from .chat_prompt import PromptMaker, settled_part
from .chats_thread import ChatsThread
from .errors import ApiError
from .loaded import LoadedModel
from .model_manager import ModelManager
from .outputs import new_request_id
from .owners import Owners
from .reuse import RequestLog
from .sse import end_task

log = logging.getLogger(__name__)
DRAFT_INTERVAL_S = 0.5
"""A draft is looked at this often while it is typed; each look renders and tokenises the chat once."""
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Wanted:
    mode: WarmMode
    draft: str = ""
    """Settled text that the next turn will begin with."""


@dataclass(slots=True)
class _Running:
    """A warm request in the engine."""

    model: LoadedModel
    request: GenerationRequest
    is_draft: bool
    done: asyncio.Future[RequestOutput]

    def covers(self, mode: WarmMode, blocks: tuple[int, ...]) -> bool:
        mine = _full_blocks(self.request.prompt_token_ids)
        return mine[: len(blocks)] == blocks and self.request.warm in (WarmMode.COMPUTE, mode)


@dataclass(slots=True)
class _Warmth:
    """One chat's."""

    wanted: Wanted | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    running: _Running | None = None
    started_at: float = float("-inf")


class Warmer:
    """At most one warm request per chat, for the newest wish. Lives on the event loop."""

    def __init__(
        self,
        chats: ChatsThread,
        models: ModelManager,
        prompts: PromptMaker,
        owners: Owners,
        requests: RequestLog,
        text_pool: Executor,
        draft_interval_s: float = DRAFT_INTERVAL_S,
    ):
        self._chats = chats
        self._models = models
        self._prompts = prompts
        self._owners = owners
        self._requests = requests
        self._text_pool = text_pool
        self._draft_interval_s = draft_interval_s
        self._warmths: dict[str, _Warmth] = {}
        self._is_stopping = False

    async def warm(self, chat_id: str, draft: str | None) -> str | None:
        """Bring the chat's blocks to the device; with a draft, compute what it settles of the next turn.

        Returns: None when it was begun, else why not: "in_trash", "model_not_loaded".

        Raises:
            UserError: there is no such chat.
        """
        chat = await self._chats.run(lambda store: store.get_chat(chat_id))
        if chat.in_trash:
            return "in_trash"
        if self._model_of(chat) is None:
            return "model_not_loaded"
        text = settled_part(draft or "")
        self._want(chat_id, Wanted(WarmMode.COMPUTE, text) if text else Wanted(WarmMode.LOAD))
        return None

    def after_turn(self, chat_id: str) -> None:
        """Compute what the next turn will need and no tier has: a template may render an answer in another way once it
        is history."""
        self._want(chat_id, Wanted(WarmMode.COMPUTE))

    def is_warming(self, chat_id: str) -> bool:
        return chat_id in self._warmths

    def cancel(self, chat_id: str) -> None:
        """A turn begins, and needs the processor. A load goes on: the turn needs just these blocks."""
        warmth = self._warmths.get(chat_id)
        if warmth is None:
            return
        warmth.wanted = None
        if warmth.running is not None and warmth.running.request.warm is WarmMode.LOAD:
            return
        if warmth.task is not None:
            warmth.task.cancel()

    async def end(self, chat_id: str) -> None:
        """Nothing of it is in the engine any more."""
        warmth = self._warmths.get(chat_id)
        if warmth is None or warmth.task is None:
            return
        await end_task(warmth.task)
        if warmth.running is not None:
            await asyncio.wait([warmth.running.done], timeout=END_TIMEOUT_S)

    async def stop(self) -> None:
        self._is_stopping = True
        for chat_id in list(self._warmths):
            await self.end(chat_id)

    def _model_of(self, chat: Chat) -> LoadedModel | None:
        """The loaded model, if it is the chat's and free."""
        try:
            return self._models.loaded if self._models.is_ready(chat.model) else None
        except ApiError:
            return None

    def _want(self, chat_id: str, wanted: Wanted) -> None:
        if self._is_stopping:
            return
        warmth = self._warmths.get(chat_id)
        if warmth is None:
            warmth = self._warmths[chat_id] = _Warmth()
            warmth.task = asyncio.get_running_loop().create_task(self._run(chat_id, warmth))
        warmth.wanted = wanted
        warmth.changed.set()

    async def _run(self, chat_id: str, warmth: _Warmth) -> None:
        try:
            while warmth.wanted is not None or warmth.running is not None:
                if warmth.wanted is None:
                    await self._wait(chat_id, warmth)
                else:
                    await self._start_newest(chat_id, warmth)
        except (UserError, EngineError) as error:  # Deleted, too long, refused by the template, queue full: no matter.
            log.debug("chat is not warmed: %s", type(error).__name__)
        finally:
            if self._warmths.get(chat_id) is warmth:
                del self._warmths[chat_id]
            if warmth.running is not None:
                warmth.running.model.engine.cancel(warmth.running.request.request_id)

    async def _wait(self, chat_id: str, warmth: _Warmth) -> None:
        """Until the engine is done or something else is wanted."""
        assert warmth.running is not None
        running, done = warmth.running, warmth.running.done
        warmth.changed.clear()
        changed = asyncio.ensure_future(warmth.changed.wait())
        events: tuple[asyncio.Future[Any], ...] = (done, changed)
        try:
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if done.done():
            warmth.running = None
            await self._note(chat_id, running, done.result())

    async def _start_newest(self, chat_id: str, warmth: _Warmth) -> None:
        """Whatever is wanted after a short while; drafts change with every key."""
        loop = asyncio.get_running_loop()
        if warmth.wanted is not None and warmth.wanted.draft:
            await asyncio.sleep(max(0.0, warmth.started_at + self._draft_interval_s - loop.time()))
        wanted, warmth.wanted = warmth.wanted, None
        if wanted is None:
            return
        warmth.started_at = loop.time()
        chat = await self._chats.run(lambda store: store.get_chat(chat_id))
        model = self._model_of(chat)
        if model is None or chat.in_trash:
            return
        token_ids = await self._prompts.next_prefix(model, chat, wanted.draft)
        blocks = _full_blocks(token_ids)
        if not blocks or (warmth.running is not None and warmth.running.covers(wanted.mode, blocks)):
            return
        if warmth.running is not None:
            model.engine.cancel(warmth.running.request.request_id)
            warmth.running = None
        request = GenerationRequest(
            request_id=new_request_id("warm"),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(),
            priority=Priority.BACKGROUND,
            is_transient=chat.is_private or bool(wanted.draft),
            owner=chat_id,
            warm=wanted.mode,
        )
        await self._submit(warmth, _Running(model, request, bool(wanted.draft), loop.create_future()))

    async def _submit(self, warmth: _Warmth, running: _Running) -> None:
        loop = asyncio.get_running_loop()
        request = running.request

        def finish(output: RequestOutput) -> None:
            if not running.done.done():
                running.done.set_result(output)

        def put(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                    loop.call_soon_threadsafe(finish, output)

        def settle(submitted: asyncio.Future[None]) -> None:
            if submitted.cancelled() or submitted.exception() is not None:
                finish(RequestOutput(request.request_id, 0, finish_reason=FinishReason.CANCELLED))
            elif warmth.running is not running or (warmth.task is not None and warmth.task.done()):
                running.model.engine.cancel(request.request_id)  # Admitted after we left.

        warmth.running = running
        submitted = loop.run_in_executor(self._text_pool, running.model.engine.submit, request, put)
        submitted.add_done_callback(settle)
        await asyncio.shield(submitted)

    async def _note(self, chat_id: str, running: _Running, output: RequestOutput) -> None:
        request = running.request
        self._requests.note_warm(output, chat_id)
        is_next_turn = request.warm is WarmMode.COMPUTE and not running.is_draft
        if output.finish_reason is FinishReason.STOP and is_next_turn and output.block_hashes:
            num_tokens = len(request.prompt_token_ids)
            await self._owners.note(chat_id, running.model.fingerprint, num_tokens, output.block_hashes)


def _full_blocks(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE]
