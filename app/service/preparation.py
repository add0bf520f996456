"""From messages to a prompt: rendering and tokenising in the text pool, never on the event loop."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from chatkv.engine.errors import PromptTooLongError
from chatkv.engine.text.messages import ChatMessage
from chatkv.engine.text.transcript import Rendered

from .errors import invalid_value
from .loaded import LoadedModel


async def render(
    model: LoadedModel,
    messages: Sequence[ChatMessage] | Callable[[], Sequence[ChatMessage]],
    pool: Executor,
    *,
    continue_final: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    today: dt.date | None = None,
) -> Rendered:
    """The prompt, checked against the context. `messages` may be a function, which then runs in the pool too.

    Raises:
        PromptTooLongError: it leaves no room for one token of answer.
        TemplateError: the model's template refuses the messages.
    """

    def work() -> Rendered:
        ready = messages() if callable(messages) else messages
        # A text far too long is refused before it costs a second of work.
        least = sum(model.text.min_num_tokens(message.content) for message in ready)
        if least >= model.context_tokens:
            raise PromptTooLongError(least, model.context_tokens)
        return model.text.render(ready, continue_final=continue_final, template_kwargs=template_kwargs, today=today)

    rendered = await asyncio.get_running_loop().run_in_executor(pool, work)
    if len(rendered.token_ids) >= model.context_tokens:
        raise PromptTooLongError(len(rendered.token_ids), model.context_tokens)
    return rendered


def check_token_ids(model: LoadedModel, token_ids: Sequence[int], param: str) -> None:
    """Raises ApiError 400 when the model has no such token."""
    for token_id in token_ids:
        if token_id >= model.text.vocab_size:
            raise invalid_value(f"{param}: token {token_id} is not one of {model.text.vocab_size}.", param)
