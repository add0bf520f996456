"""The model's chat template, and what it takes to make a client's messages fit it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from ..errors import TemplateError
from .sandbox import MAX_CHARS, RefusedByTemplateError, TemplateEnvironment, step_counter
from .tokenizer import Tokenizer

Message = dict[str, Any]
_NO_TEMPLATE = "{{ raise_exception('this model has no chat template: it completes text and does not chat') }}"
_PROBE = "chatkv probe"


class ChatTemplate:
    """Compiled once, thread-safe. The same input gives the same bytes, in every process."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """`special_tokens`: `bos_token` and the like, variables of the template. Raises TemplateError."""
        self._variables = dict(special_tokens or {})
        try:
            self._template = TemplateEnvironment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateError(f"This model's chat template does not compile: {error}") from error

    @classmethod
    def from_dir(cls, native_dir: Path, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """chat_template.jinja, else the template in tokenizer_config.json. Without any, each render is refused."""
        config = _read_config(native_dir / "tokenizer_config.json")
        file = native_dir / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else _template_in(config)
        return cls(source or _NO_TEMPLATE, _special_tokens(config, tokenizer or Tokenizer.from_dir(native_dir)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
    ) -> str:
        """The prompt as text. `today` is what the template may know of the date; a chat keeps the day it began.

        When the template refuses the messages, or drops a system message: system messages are merged at the start,
        then neighbours of one role, then the system text goes into the first turn. What is refused even so raises
        TemplateError with the template's own words.
        """
        variables = {
            **self._variables,
            **(template_kwargs or {}),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _clock(today or dt.datetime.now().astimezone().date()),
        }
        refusal: RefusedByTemplateError | None = None
        fallback: str | None = None
        for variant in _variants(list(messages)):
            try:
                text = self._render_once(variant, variables)
            except RefusedByTemplateError as error:
                refusal = refusal or error
                continue
            if not _drops_system(messages, text):
                return text
            fallback = fallback if fallback is not None else text
        if fallback is not None:
            return fallback
        raise TemplateError(f"The model's chat template refuses these messages: {refusal}")

    @cached_property
    def wants_text_arguments(self) -> bool:
        """Whether tool-call arguments are put in as the JSON text they are. Else it wants a mapping."""
        arguments = '{"chatkv":  "probe"}'
        call = {"type": "function", "id": "call00000", "function": {"name": "probe", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return arguments in self.render([{"role": "user", "content": _PROBE}, answer], add_generation_prompt=False)
        except TemplateError:
            return False

    @cached_property
    def _wants_parts(self) -> bool:
        """Templates of models that also see pictures may read nothing but lists of parts."""
        variables = {
            **self._variables,
            "tools": None,
            "add_generation_prompt": True,
            "strftime_now": _clock(dt.date.min),
        }

        def shows(content: Any) -> bool:
            try:
                return _PROBE in self._run([{"role": "user", "content": content}], variables)
            except (TemplateError, RefusedByTemplateError):
                return False

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _render_once(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        if self._wants_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return self._run(messages, variables)

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate({**variables, "messages": messages, **step_counter()}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise TemplateError(f"The model's chat template makes more than {MAX_CHARS:,} characters of this.")
        except (RefusedByTemplateError, TemplateError):
            raise
        except Exception as error:  # Whatever a template does wrong, it is the template's or the messages' fault.
            raise TemplateError(
                f"The model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return "".join(pieces)


def _variants(messages: list[Message]) -> Iterator[list[Message]]:
    yield messages
    seen = [messages]
    gathered = _gather_system(messages)
    for variant in (gathered, _merge_neighbours(gathered), _merge_neighbours(_fold_system(gathered))):
        if variant not in seen:
            seen.append(variant)
            yield variant


def _gather_system(messages: list[Message]) -> list[Message]:
    """All system messages as one, at the start."""
    system = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [*([_merged(system)] if system else []), *others]


def _merge_neighbours(messages: list[Message]) -> list[Message]:
    """For templates that demand alternation. Tool calls and their results stay apart."""
    merged: list[Message] = []
    for message in messages:
        is_mergeable = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        if merged and is_mergeable and merged[-1]["role"] == message["role"] and not merged[-1].get("tool_calls"):
            merged[-1] = _merged([merged[-1], message])
        else:
            merged.append(message)
    return merged


def _fold_system(messages: list[Message]) -> list[Message]:
    """For templates without a system role: as the beginning of the person's first turn."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system = {**messages[0], "role": "user"}
    return [system, *messages[1:]]


def _merged(messages: Sequence[Message]) -> Message:
    return {**messages[0], "content": "\n\n".join(message["content"] for message in messages)}


def _drops_system(messages: Sequence[Message], text: str) -> bool:
    """Some templates read only the first system message, or none. Those that edit it keep most of it."""
    contents = (message["content"].strip() for message in messages if message["role"] == "system")
    return any(content and content[:20] not in text and content[-20:] not in text for content in contents)


def _clock(today: dt.date) -> Callable[[str], str]:
    """Midnight of the day: a clock in the prompt would change its first block with every request."""
    return dt.datetime.combine(today, dt.time()).strftime


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # Only a second source of what the native directory says elsewhere.
    return config if isinstance(config, dict) else {}


def _template_in(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """The ids that the model declares, and over them what tokenizer_config.json names."""
    tokens = {}
    if tokenizer.bos_id is not None:
        tokens["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    if tokenizer.first_eos_id is not None:
        tokens["eos_token"] = tokenizer.token_text(tokenizer.first_eos_id)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        declared = config.get(name)
        text = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(text, str):
            tokens[name] = text
    return tokens
