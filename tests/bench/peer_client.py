"""A client so lean that what it measures is the server: at 400 tokens a second a comfortable one takes a good part of
a core.

Lines are stamped as they arrive and read as JSON afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from tests.running_service import Timing

Address = Path | int
"""A unix socket, or a port of this machine."""
Messages = list[dict[str, Any]]
MAX_LINE_BYTES = 1 << 20
EVENT = b"data: "


class RefusedError(RuntimeError):
    """The server answered with another status than 200."""


async def stream_chat(address: Address, messages: Messages, num_tokens: int) -> Timing:
    """One greedy answer of exactly `num_tokens` tokens, over a connection of its own; end-of-turn ids are ignored.

    Raises:
        OSError: nobody listens, or the connection broke.
        RefusedError: the server said no.
    """
    body = {
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,  # llama-server's name for what it does by default; ours always does.
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    reader, writer = await _send(address, "POST", "/v1/chat/completions", json.dumps(body).encode())
    try:
        await _check_status(reader)
        lines = []
        while line := await reader.readline():
            if line.startswith(EVENT):
                lines.append((time.perf_counter() - started, line))
    finally:
        writer.close()
    return _timing(lines)


async def get_json(address: Address, path: str) -> dict[str, Any]:
    reader, writer = await _send(address, "GET", path, b"")
    try:
        await _check_status(reader)
        text = await reader.read()
    finally:
        writer.close()
    return dict(json.loads(text[text.index(b"{") : text.rindex(b"}") + 1]))  # Chunk sizes may stand around it.


async def _send(
    address: Address, method: str, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, Path):
        reader, writer = await asyncio.open_unix_connection(str(address), limit=MAX_LINE_BYTES)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", address, limit=MAX_LINE_BYTES)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def _check_status(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    if status != b"200":
        raise RefusedError(f"status {status.decode()}: {(await reader.read()).decode()[:300]}")


def _timing(lines: list[tuple[float, bytes]]) -> Timing:
    timing = Timing()
    for arrived_s, line in lines:
        timing.total_s = arrived_s
        if line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(EVENT) :])
        if "error" in event:
            raise RefusedError(str(event["error"]))
        if usage := event.get("usage"):
            timing.num_prompt_tokens = usage["prompt_tokens"]
            timing.num_tokens = usage["completion_tokens"]
            timing.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                timing.ttft_s = timing.ttft_s or arrived_s
                timing.arrivals_s.append(arrived_s)
                timing.text += text
    return timing
