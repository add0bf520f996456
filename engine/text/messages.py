"""Chat messages as the engine sees them, and how a client's JSON becomes one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError

_ROLE_TO_ROLE = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    """system, user, assistant or tool; others by their known other names."""
    content: str
    token_ids: tuple[int, ...] | None = None
    """An answer's ids as sampled (`answer_ids`), also if none is left; None: only its text is known."""
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def from_api(cls, message: Mapping[str, Any], index: int = 0) -> ChatMessage:
        """From one entry of an OpenAI-style `messages` list. Raises InvalidRequestError naming the field."""
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{where} must be an object with role and content", where)
        role = message.get("role")
        calls = message.get("tool_calls") or None
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise InvalidRequestError(f"{where}.tool_calls must be a list of objects", f"{where}.tool_calls")
        return cls(
            role=known_role(role, where),
            content=_text_of(message.get("content"), f"{where}.content"),
            tool_calls=calls,
            tool_call_id=_optional_text(message.get("tool_call_id"), f"{where}.tool_call_id"),
            name=_optional_text(message.get("name"), f"{where}.name"),
        )


def known_role(role: Any, where: str = "messages") -> str:
    """`developer` is `system`, and so on. A role is never free text: it stands among control tokens."""
    if not isinstance(role, str) or role not in _ROLE_TO_ROLE:
        raise InvalidRequestError(
            f"{where}.role must be one of system, developer, user, assistant and tool, got {role!r}", f"{where}.role"
        )
    return _ROLE_TO_ROLE[role]


def decoded_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A tool call in the usual nesting, its arguments as JSON text or as the mapping that the text describes.

    Text that is not a JSON object stays as it is.
    """
    function = call.get("function")
    function = dict(function) if isinstance(function, Mapping) else {key: call[key] for key in call if key != "type"}
    arguments = function.get("arguments", {})
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            decoded = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string, null or a list of parts", where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"{where}: a part of type {kind!r} is not supported, only text", where)
    return "\n".join(texts)


def _optional_text(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{where} must be a string", where)
    return value
