"""Answers as bytes: compact JSON, errors, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from chatkv.app.chats.database import clean_text

from .errors import ApiError

SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n"
"""A comment line. Not `: ping` (Continue ends the stream there), and no blank line (old readers dispatch on it)."""
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def compact_json(value: Any) -> bytes:
    """One line, no spaces, valid UTF-8 (lone surrogates, as file names may hold them, become U+FFFD)."""
    text = _ENCODER.encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return clean_text(text).encode()


def sse_event(value: Any) -> bytes:
    return b"data: " + compact_json(value) + b"\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return compact_json(content)


class ErrorResponse(JsonResponse):
    def __init__(self, error: ApiError):
        super().__init__(error.body(), status_code=error.status, headers=error.headers)


class NoContent(Response):
    def __init__(self, headers: Mapping[str, str]):
        super().__init__(status_code=204, headers=dict(headers))
