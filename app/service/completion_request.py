"""`POST /v1/chat/completions`: the body as a frozen request. Nulls are absent fields, unknown fields are ignored."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatkv.engine.request import Priority, SamplingParams
from chatkv.engine.text.messages import ChatMessage

from .errors import invalid_value

MAX_MESSAGES = 10_000
MAX_CHOICES = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of one stop string: the automaton that looks for them has a state for each character."""
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    n: int
    is_stream: bool
    include_usage: bool
    """Of a stream: send the usage chunk. A whole answer always has it."""
    has_logprobs: bool
    wants_debug: bool
    """`"chatkv": true`: add what was reused and where the prefix was missed."""
    priority: Priority
    template_kwargs: Mapping[str, Any]


def parse_completion(body: Mapping[str, Any], wants_debug: bool = False) -> CompletionRequest:
    """Raises ApiError or InvalidRequestError naming the field."""
    fields = Fields(body)
    is_stream = fields.flag("stream")
    _refuse_unsupported(fields)
    return CompletionRequest(
        model=fields.text("model"),
        messages=_messages(fields),
        sampling=_sampling(fields),
        n=fields.integer("n", "n_cmpl", default=1, low=1, high=MAX_CHOICES) or 1,
        is_stream=is_stream,
        include_usage=is_stream and Fields(fields.mapping("stream_options"), "stream_options.").flag("include_usage"),
        has_logprobs=fields.flag("logprobs"),
        wants_debug=wants_debug or fields.get("chatkv") is True,
        priority=_priority(fields),
        template_kwargs=fields.mapping("chat_template_kwargs"),
    )


class Fields:
    """Typed reading of a JSON object. Every method takes aliases, the strongest first."""

    def __init__(self, values: Mapping[str, Any], prefix: str = ""):
        self._values = values
        self._prefix = prefix

    def get(self, *names: str) -> Any:
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def name_of(self, *names: str) -> str:
        """The alias that the client used, for messages."""
        return self._prefix + next((name for name in names if self._values.get(name) is not None), names[0])

    def flag(self, *names: str) -> bool:
        value = self.get(*names)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._wrong(names, "true or false", value)

    def text(self, *names: str) -> str:
        value = self.get(*names)
        if value is None or isinstance(value, str):
            return value or ""
        raise self._wrong(names, "a string", value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        value = self.get(*names)
        if value is None or isinstance(value, dict):
            return value or {}
        raise self._wrong(names, "an object", value)

    def number(self, *names: str, default: float) -> float:
        value = self.get(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._wrong(names, "a number", value)
        return float(value)

    def integer(
        self, *names: str, default: int | None = None, low: int = -(2**63), high: int = 2**63 - 1
    ) -> int | None:
        value = self.get(*names)
        if value is None:
            return default
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not low <= value <= high:
            raise self._wrong(names, f"a whole number from {low} to {high}", value)
        return int(value)

    def _wrong(self, names: tuple[str, ...], expected: str, value: Any) -> Exception:
        name = self.name_of(*names)
        shown = value if isinstance(value, int | float | bool) else type(value).__name__
        return invalid_value(f"{name} must be {expected}, got {shown}.", name)


def _refuse_unsupported(fields: Fields) -> None:
    """What would change the answer's form and is not there yet is refused: an ignored schema looks like an answer."""
    response_format = fields.mapping("response_format")
    if response_format and response_format.get("type") != "text":
        raise invalid_value("response_format: this version of chatkv answers as plain text only.", "response_format")
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise invalid_value("tool_choice: this version of chatkv cannot force a tool call.", "tool_choice")


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_value("messages must be a list with at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid_value(f"messages holds {len(messages)} entries, at most {MAX_MESSAGES} are allowed.", "messages")
    return tuple(ChatMessage.from_api(message, index) for index, message in enumerate(messages))


def _sampling(fields: Fields) -> SamplingParams:
    max_tokens = fields.integer("max_completion_tokens", "max_tokens", "n_predict")
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    return SamplingParams(
        temperature=fields.number("temperature", default=1.0),
        top_k=max(0, fields.integer("top_k", default=0) or 0),
        top_p=fields.number("top_p", default=1.0),
        min_p=fields.number("min_p", default=0.0),
        repetition_penalty=fields.number("repetition_penalty", "repeat_penalty", default=1.0),
        presence_penalty=fields.number("presence_penalty", default=0.0),
        frequency_penalty=fields.number("frequency_penalty", default=0.0),
        logit_bias=_logit_bias(fields.get("logit_bias")),
        seed=secrets.randbits(63) if seed is None or seed == -1 else seed,
        num_logprobs=_num_logprobs(fields),
        max_tokens=None if max_tokens == -1 else max_tokens,
        min_tokens=fields.integer("min_tokens", default=0, low=0) or 0,
        stop=_stops(fields.get("stop")),
        stop_token_ids=frozenset(_token_ids(fields.get("stop_token_ids"))),
        ignore_eos=fields.flag("ignore_eos"),
    )


def _num_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if fields.flag("logprobs"):
        return num_top or 0
    if num_top:
        raise invalid_value("top_logprobs needs logprobs: true.", "top_logprobs")
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid_value("stop must be a string or a list of strings.", "stop")
    if len(stops) > MAX_STOPS:
        raise invalid_value(f"stop holds {len(stops)} strings, at most {MAX_STOPS} are allowed.", "stop")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise invalid_value(f"stop holds a string of more than {MAX_STOP_CHARS} characters.", "stop")
    return tuple(stop for stop in stops if stop)


def _token_ids(value: Any) -> list[int]:
    ids = value or []
    if not isinstance(ids, list) or not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise invalid_value("stop_token_ids must be a list of token ids.", "stop_token_ids")
    return ids


def _logit_bias(value: Any) -> dict[int, float]:
    """OpenAI's mapping of string ids, or llama.cpp's list of pairs."""
    if value is None:
        return {}
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_LOGIT_BIASES:
        raise invalid_value(f"logit_bias must be an object with at most {MAX_LOGIT_BIASES} token ids.", "logit_bias")
    biases = {}
    for pair in pairs:
        try:
            token_id, bias = int(pair[0]), float(pair[1])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise invalid_value("logit_bias must map token ids to numbers.", "logit_bias") from error
        if token_id < 0 or not -100.0 <= bias <= 100.0:
            raise invalid_value("logit_bias needs token ids from 0 and values from -100 to 100.", "logit_bias")
        biases[token_id] = bias
    return biases


def _priority(fields: Fields) -> Priority:
    """chatkv's own field; vLLM's integer `priority` means something else and is ignored."""
    value = fields.get("chatkv_priority")
    if value is None:
        return Priority.INTERACTIVE
    try:
        return Priority[str(value).upper()]
    except KeyError as error:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise invalid_value(f"chatkv_priority must be one of {names}.", "chatkv_priority") from error
