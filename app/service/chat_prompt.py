"""A chat's path as messages for the template, its sampling, and the way out when it no longer fits."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from chatkv.app.chats.records import Chat, ChatSettings, Message, Role
from chatkv.app.hub.installed import InstalledModel
from chatkv.engine.errors import PromptTooLongError
from chatkv.engine.request import SamplingParams
from chatkv.engine.text.messages import ChatMessage

from .chats_thread import ChatsThread
from .errors import to_api_error
from .loaded import LoadedModel
from .model_manager import ModelManager
from .preparation import render

DEFAULT_SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
"""Where neither the chat nor the model's own generation_config.json says anything."""
MAX_WORD_CHARS = 64
_STAND_INS = ("a", "b")
_STAND_IN = _STAND_INS[0]
"""For a user's text that is not known yet: one token, whatever the tokenizer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A leased model and what it will read."""

    model: LoadedModel
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    """At the end of the prompt: ids of the reply that is continued, as its visible text has them."""


class PromptMaker:
    def __init__(self, chats: ChatsThread, models: ModelManager, text_pool: Executor):
        self._chats = chats
        self._models = models
        self._text_pool = text_pool
        self._tokens_after_text: tuple[InstalledModel | None, int] = None, 0

    async def prepare(
        self, chat: Chat, tip_id: str | None, text: str | None = None, is_continued: bool = False
    ) -> Prompt:
        """Lease the model and render the path to `tip_id` and `text`; or the path, to go on within its last reply.

        Raises:
            ApiError: 400 with `choices` when it is longer than the context; others of lease and template.
        """
        model = await self._models.lease(chat.model)
        try:
            path = await self._path(model, chat, tip_id)

            def build() -> list[ChatMessage]:
                return chat_messages(chat.settings, path, chat.context_start_id, model, text)

            try:
                rendered = await render(model, build, self._text_pool, continue_final=is_continued, today=day_of(path))
            except PromptTooLongError as error:
                refusal = to_api_error(error)
                refusal.details["choices"] = await ways_out(chat, path, text, model, self._text_pool)
                raise refusal from error
            return Prompt(model, tuple(rendered.token_ids), rendered.continued_ids)
        except BaseException:
            self._models.release()
            raise

    async def next_prefix(self, model: LoadedModel, chat: Chat, draft: str = "") -> tuple[int, ...]:
        """What the next turn's prompt will begin with, as far as `draft`, a settled part of it, decides. No lease.

        Raises:
            UserError, EngineError: the chat is gone, it is too long, the template refuses it.
        """
        path = await self._path(model, chat, chat.tip_id)

        def build() -> list[ChatMessage]:
            return chat_messages(chat.settings, path, chat.context_start_id, model, draft or _STAND_IN)

        num_after = await self._num_tokens_after_text(model)
        rendered = await render(model, build, self._text_pool, today=day_of(path))
        return tuple(rendered.token_ids[: len(rendered.token_ids) - num_after - (not draft)])

    async def _num_tokens_after_text(self, model: LoadedModel) -> int:
        known_of, num_after = self._tokens_after_text
        if known_of != model.installed:
            loop = asyncio.get_running_loop()
            num_after = await loop.run_in_executor(self._text_pool, num_tokens_after_text, model)
            self._tokens_after_text = model.installed, num_after
        return num_after

    async def _path(self, model: LoadedModel, chat: Chat, tip_id: str | None) -> Sequence[Message]:
        tokenizer_hash = model.text.tokenizer_hash
        return await self._chats.run(lambda store: store.path(chat.id, tip_id, tokenizer_hash)) if tip_id else []


def day_of(path: Sequence[Message]) -> dt.date | None:
    """The day the conversation began, for good, in its forks too: a template with a date must not change the prefix at
    midnight."""
    return dt.datetime.fromtimestamp(path[0].created_at).astimezone().date() if path else None


def num_tokens_after_text(model: LoadedModel) -> int:
    """What the template puts behind the last user text, in tokens. Long: call it in the text pool."""
    one, other = (model.text.render([ChatMessage(role="user", content=text)]).token_ids for text in _STAND_INS)
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), 0)


def settled_part(draft: str) -> str:
    """The part of a draft whose tokens will hardly change when more is typed: all but the word that is being typed."""
    kept = draft.rstrip()
    if kept != draft:
        return kept
    words = re.split(r"\s+(?=\S*$)", kept, maxsplit=1)
    last_word = words[-1]
    if len(last_word) > MAX_WORD_CHARS:  # A script without spaces.
        return kept[: -MAX_WORD_CHARS // 2]
    return words[0] if len(words) > 1 else ""


def chat_messages(
    settings: ChatSettings, path: Sequence[Message], start_id: str | None, model: LoadedModel, text: str | None = None
) -> list[ChatMessage]:
    """System prompt, the path from `start_id` on, and the new `text`. Answers carry their exact ids.

    Ids are cut to what the visible text shows: after a stop string, a cancel or a kill more was sampled than was seen.
    Long: call it in the text pool.
    """
    messages = [ChatMessage(role="system", content=settings.system)] if settings.system.strip() else []
    for message in path_from(path, start_id):
        if message.role is Role.ASSISTANT and not message.content:
            continue  # A reply that failed or was stopped before its first token.
        ids = None
        if message.role is Role.ASSISTANT and message.token_ids:
            ids = model.text.answer_ids(message.token_ids, message.content)
        messages.append(ChatMessage(role=message.role.value, content=message.content, token_ids=ids))
    if text is not None:
        messages.append(ChatMessage(role="user", content=text))
    return messages


def path_from(path: Sequence[Message], start_id: str | None) -> Sequence[Message]:
    """The part of the path that is sent. A start that is not on it (another branch) means all of it."""
    ids = [message.id for message in path]
    return path[ids.index(start_id) :] if start_id in ids else path


def chat_sampling(settings: ChatSettings, model: LoadedModel | None, num_siblings: int = 0) -> SamplingParams:
    """The chat's values over the model's over chatkv's. A further version of a reply gets another seed.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    values: dict[str, Any] = dict(DEFAULT_SAMPLING)
    if model is not None:
        values |= model.default_sampling
    values |= settings.sampling
    seed = values.pop("seed", None)
    return SamplingParams(**values, seed=secrets.randbits(63) if seed is None else seed + num_siblings)


async def ways_out(
    chat: Chat, path: Sequence[Message], text: str | None, model: LoadedModel, pool: Executor
) -> list[dict[str, Any]]:
    """What a person can choose when the chat is longer than the context: the fewest turns to leave out, measured.

    A quarter of the context is kept free for what follows: dropping one turn at a time would make every later turn
    compute the whole prompt again.
    """
    goal = model.context_tokens - model.context_tokens // 4
    sent = path_from(path, chat.context_start_id)
    starts = [message.id for message in sent if message.role is Role.USER][1:]
    best: tuple[int, int] | None = None
    low, high = 0, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2
        num_tokens = await _num_tokens(chat.settings, path, starts[middle], text, model, pool)
        if num_tokens is not None and (num_tokens <= goal or middle == len(starts) - 1):
            best, high = (middle, num_tokens), middle - 1
        else:
            low = middle + 1
    if best is None:
        return []
    cut = {"context_start_id": starts[best[0]], "num_turns": best[0] + 1, "num_tokens_after": best[1]}
    return [{"kind": "drop_oldest", **cut}, {"kind": "fork", "message_id": path[-1].id, **cut}]


async def _num_tokens(
    settings: ChatSettings, path: Sequence[Message], start_id: str, text: str | None, model: LoadedModel, pool: Executor
) -> int | None:
    """Prompt tokens from `start_id` on; None when even that does not fit."""
    try:
        return len((await render(model, lambda: chat_messages(settings, path, start_id, model, text), pool)).token_ids)
    except PromptTooLongError:
        return None
