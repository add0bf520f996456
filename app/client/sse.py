"""Reading server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """JSON of each `data:` line, up to the end or `[DONE]`. Lines end with LF only: answers may hold U+2028."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == line:
                continue  # A comment, or the blank line between events.
            if data == b"[DONE]":
                return
            yield json.loads(data)
