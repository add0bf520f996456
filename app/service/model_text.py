"""The text side of a real model: tokenizer, chat template, exact transcripts, memory of sampled answers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatkv.engine.request import Miss
from chatkv.engine.text.detokenizer import TextStream, answer_ids
from chatkv.engine.text.messages import ChatMessage
from chatkv.engine.text.miss import MissReason, explain_miss
from chatkv.engine.text.run_memory import RunMemory
from chatkv.engine.text.template import ChatTemplate
from chatkv.engine.text.tokenizer import Tokenizer
from chatkv.engine.text.transcript import Rendered, Transcript


class ModelText:
    """Implements `loaded.TextSide`. Thread-safe."""

    def __init__(self, native_dir: Path):
        """Raises BrokenModelError, UnsupportedModelError, TemplateError."""
        self.tokenizer = Tokenizer.from_dir(native_dir)
        self._transcript = Transcript(self.tokenizer, ChatTemplate.from_dir(native_dir, self.tokenizer))
        self.memory = RunMemory()
        """Replaced before the first prompt, where answers are to outlive the process."""

    @property
    def tokenizer_hash(self) -> str:
        return self.tokenizer.content_hash

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def min_num_tokens(self, text: str) -> int:
        return self.tokenizer.min_num_tokens(text)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
    ) -> Rendered:
        return self._transcript.render(
            messages, continue_final=continue_final, template_kwargs=template_kwargs, today=today, memory=self.memory
        )

    def remember(
        self,
        prompt_token_ids: Sequence[int],
        text: str,
        sampled_ids: Sequence[int],
        block_hash: bytes | None = None,
    ) -> None:
        self.memory.remember(prompt_token_ids, text, self.answer_ids(sampled_ids, text), block_hash)

    def forget_answers(self) -> None:
        self.memory.clear()

    def answer_ids(self, sampled_ids: Sequence[int], visible_text: str) -> tuple[int, ...]:
        return answer_ids(self.tokenizer, sampled_ids, visible_text)

    def explain_miss(self, prompt_token_ids: Sequence[int], miss: Miss) -> MissReason:
        return explain_miss(self.tokenizer, prompt_token_ids, miss)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def new_stream(self, prompt_tail_ids: Sequence[int], stop: tuple[str, ...], resume_text: str) -> TextStream:
        """The engine's factory of streaming detokenizers."""
        return TextStream(self.tokenizer, prompt_tail_ids, stop, resume_text)
