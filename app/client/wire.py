"""What goes over the socket and comes back, as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import RefusedError


def body_of(body: Mapping[str, Any] | None) -> bytes | None:
    """ASCII: a command line that is not UTF-8 brings halves of surrogate pairs, which httpx cannot encode."""
    return None if body is None else json.dumps(body, separators=(",", ":")).encode("ascii")


def valid_values(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: valid_text(value) if isinstance(value, str) else value for name, value in (params or {}).items()}


def valid_text(text: str) -> str:
    """Without halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_status(status: int, content: bytes) -> None:
    """Raises RefusedError for an answer that says no."""
    if status < 400:
        return
    try:
        details = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        details = {}
    raise RefusedError(status, details if isinstance(details, dict) else {})
