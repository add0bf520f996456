"""The client by itself: what it reads, what it raises, what it does not import."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chatkv.app.client import Client, RefusedError, ServiceLostError, ensure_running
from chatkv.app.client.sse import read_events
from chatkv.app.errors import UserError
from chatkv.app.paths import Paths


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_events_are_read_however_the_bytes_are_cut() -> None:
    text = "a\u2028b\u0085c 日本 👩‍👧"
    stream = (
        f': keep-alive\ndata: {{"text":"{text}"}}\n\ndata: {{"n":2}}\n\ndata: [DONE]\n\ndata: {{"n":3}}\n\n'.encode()
    )
    for size in (1, 2, 3, 7, len(stream)):
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        events = [event async for event in read_events(chunks(*parts))]
        assert events == [{"text": text}, {"n": 2}], size


async def test_without_a_service_every_call_says_so(home: Path) -> None:
    async with Client() as client:
        with pytest.raises(ServiceLostError) as lost:
            await client.status()
        assert "does not answer" in str(lost.value)
        with pytest.raises(ServiceLostError):
            await anext(client.events())


async def test_a_service_that_dies_at_once_is_an_error_with_its_words(home: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no space for the moon')")
    with pytest.raises(UserError, match="did not start") as refused:
        await ensure_running(Paths.from_env(), command)
    assert "no space for the moon" in str(refused.value)
    assert "service.log" in str(refused.value)


async def test_a_trace_of_a_service_is_not_shown(home: Path) -> None:
    command = (sys.executable, "-c", "def f(): raise OSError('no moon')\nf()")
    with pytest.raises(UserError) as refused:
        await ensure_running(Paths.from_env(), command)
    assert "OSError: no moon" in str(refused.value)
    assert 'File "' not in str(refused.value)


async def test_a_service_that_never_listens_is_given_up(home: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.stdin.read(); input()")
    with pytest.raises(UserError):
        await ensure_running(Paths.from_env(), command, timeout_s=0.2)


async def test_a_refusal_carries_code_details_and_hint(home: Path) -> None:
    body = b'{"error":{"message":"Too long.\\nShorten it.","type":"t","param":null,"code":"x","n_ctx":5}}'
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    paths = Paths.from_env()
    paths.make_private()
    async with await asyncio.start_unix_server(serve, paths.socket_path), Client(paths) as client:
        with pytest.raises(RefusedError) as refused:
            await client.status()
    error = refused.value
    assert (error.status, error.code, error.details["n_ctx"]) == (400, "x", 5)
    assert (error.message, error.hint) == ("Too long.", "Shorten it.")


def test_importing_the_client_is_light() -> None:
    code = (
        "import sys, chatkv.app.client; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'fastapi', 'uvicorn')"
        " or name.startswith(('chatkv.engine', 'chatkv.kernels'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
