"""What the service needs of a loaded model: an engine, its text side, a few facts. Imports no torch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chatkv.app.hub.installed import InstalledModel
from chatkv.engine.metrics import EngineStats
from chatkv.engine.request import GenerationRequest, RequestOutput
from chatkv.engine.text.messages import ChatMessage
from chatkv.engine.text.transcript import Rendered


class EngineHandle(Protocol):
    """The engine thread (`chatkv.engine.engine.EngineThread`), or the scripted one of the tests."""

    def submit(self, request: GenerationRequest, on_output: Callable[[RequestOutput], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def count_cached(self, prompt_token_ids: Sequence[int]) -> int: ...

    def close(self) -> None: ...


class TextSide(Protocol):
    """Text to ids and back. Every method may take long: call it in the text pool, not on the event loop."""

    @property
    def tokenizer_hash(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def min_num_tokens(self, text: str) -> int:
        """A lower bound, quick: a text that cannot fit is refused without tokenising it."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
    ) -> Rendered:
        """Prompt ids by the model's chat template, which may know the date. Raises TemplateError."""
        ...

    def remember(self, prompt_token_ids: Sequence[int], text: str, sampled_ids: Sequence[int]) -> None:
        """Keep how an answer was sampled, for a client that sends it back as text only."""
        ...

    def answer_ids(self, sampled_ids: Sequence[int], visible_text: str) -> tuple[int, ...]:
        """The ids to keep of an answer that is seen as `visible_text`."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One model in memory. `close` ends its engine thread and frees it."""

    installed: InstalledModel
    context_tokens: int
    """The smaller of the setting and what the model was trained for."""
    num_embd: int
    device: str
    default_sampling: Mapping[str, float]
    """Of the model's own generation_config.json: SamplingParams fields."""
    block_bytes: int
    engine: EngineHandle
    text: TextSide

    @property
    def name(self) -> str:
        return self.installed.name

    def close(self) -> None:
        self.engine.close()


Loader = Callable[[InstalledModel, Callable[[float], None]], LoadedModel]
"""Loads an installed model; reports progress from 0 to 1. Runs in a thread of its own; imports torch."""
