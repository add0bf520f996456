"""Chat completions on the wire: chunks of a stream, the whole answer, usage, logprobs (OpenAI's shapes)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from chatkv.engine.request import FinishReason, GenerationRequest, RequestOutput, TokenLogprob

from .completion_request import CompletionRequest
from .errors import ApiError
from .loaded import LoadedModel
from .reuse import own_reuse_json, reuse_json

_FINGERPRINT = f"b-chatkv-{version('chatkv')}"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Choice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the tokens whose text was not sent yet (a stream), or of all (a whole answer)."""
    block_hashes: tuple[bytes, ...] = ()
    """Of the full blocks of prompt and answer, once it has ended."""


class Completion:
    """One request's answer as it grows: feed it outputs, it says what to send."""

    def __init__(self, running: GenerationRequest, request: CompletionRequest, model: LoadedModel, is_unix: bool):
        self.id = running.request_id
        self._prompt_token_ids = running.prompt_token_ids
        self.created = int(time.time())
        self.request = request
        self.model = model
        self.is_unix = is_unix
        self.choices = [Choice(index) for index in range(request.n)]
        self.failure: ApiError | None = None
        """Why it ended before its end."""
        self.facts = RequestOutput(self.id, 0)
        """The newest output that told of the prompt."""

    @property
    def is_done(self) -> bool:
        return self.failure is not None or all(choice.finish_reason for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The role, once per choice."""
        for choice in self.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})

    def add(self, output: RequestOutput) -> None:
        """Take one output in."""
        choice = self.choices[output.index]
        choice.text += output.text
        choice.token_ids += output.token_ids
        if self.request.has_logprobs:
            choice.logprobs.extend(output.logprobs)
        if output.num_prompt_tokens:
            self.facts = output
        if output.finish_reason is FinishReason.CANCELLED:
            # The SDKs of OpenAI send a 409 again unless they are told not to.
            headers = {"x-should-retry": "false"}
            self.failure = ApiError(409, "The request was cancelled.", "cancelled", headers=headers)
        elif output.finish_reason is FinishReason.ERROR:
            self.failure = ApiError(500, output.error or "The engine failed.", "generation_failed")
        elif output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            choice.block_hashes = output.block_hashes

    def chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What a stream sends for an output that was just added: nothing while its text is held back."""
        choice = self.choices[output.index]
        if output.text:
            yield self._chunk(choice.index, {"content": output.text}, logprobs=self._take_logprobs(choice))
        if output.finish_reason in _REASONS:
            chunk = self._chunk(choice.index, {}, self._take_logprobs(choice), _REASONS[output.finish_reason])
            yield chunk | (self._debug() if self.is_done else {})

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk") | {"choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer of a request without `stream`."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._take_logprobs(choice),
                "finish_reason": _REASONS[choice.finish_reason or FinishReason.STOP],
            }
            for choice in self.choices
        ]
        return self._envelope("chat.completion") | {"choices": choices, "usage": self.usage()} | self._debug()

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.facts.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.facts.num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.facts.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": _FINGERPRINT,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self.request.has_logprobs:
            return None
        taken, choice.logprobs = choice.logprobs, []
        return {"content": [self._logprob(entry) for entry in taken], "refusal": None}

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.model.text.token_bytes(token_id)
        # JSON has no infinities; OpenAI's own stand-in for "impossible" is -9999.
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    def _debug(self) -> dict[str, Any]:
        """What was reused. A TCP client sees its own text at the miss; the app also sees what was cached there."""
        if not self.request.wants_debug:
            return {}
        if self.is_unix:
            return {"chatkv": reuse_json(self.model, self._prompt_token_ids, self.facts)}
        return {"chatkv": own_reuse_json(self.model, self.facts)}
