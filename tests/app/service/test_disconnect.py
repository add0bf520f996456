"""E2: closing the client's socket ends its request in every state, and gives the model back."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.service.outputs import OutputStream

from .fake_engine import fake_installed
from .support import FakeModels, Running, running_service, until


async def post_and_wait(running: Running, content: str, **fields: Any) -> asyncio.StreamWriter:
    """A request whose answer nobody reads; the caller closes the socket."""
    body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
    _, writer = await asyncio.open_unix_connection(running.paths.socket_path)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
    return writer


def is_all_free(running: Running) -> bool:
    return running.engine.num_active == 0 and running.service.generations.num_running == 0


FORMS = [{"stream": True}, {"stream": False}, {"stream": True, "n": 4}, {"stream": False, "n": 4}]


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_in_decode(running: Running, form: dict[str, Any]) -> None:
    writer = await post_and_wait(running, "hold", **form)
    await until(lambda: running.engine.stats().num_generated_tokens > 0)
    writer.close()
    await until(lambda: is_all_free(running))


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_in_prefill(home: Path, form: dict[str, Any]) -> None:
    async with running_service(FakeModels(prefill_chunk=0)) as running:
        await running.ready()
        writer = await post_and_wait(running, "say hi", **form)
        await until(lambda: running.engine.stats().num_running == 1)
        writer.close()
        await until(lambda: is_all_free(running))


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_in_the_queue(running: Running, form: dict[str, Any]) -> None:
    running.engine.step_gate.clear()
    writer = await post_and_wait(running, "say hi", **form)
    await until(lambda: running.engine.stats().num_waiting == 1)
    writer.close()
    await until(lambda: is_all_free(running))


async def test_on_the_way_into_the_engine(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a closed socket, and by a cancel."""
    submit, is_inside, may_go_on = running.engine.submit, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(20)
        submit(*arguments)

    monkeypatch.setattr(running.engine, "submit", slow)
    for is_closed in (True, False):
        is_inside.clear()
        may_go_on.clear()
        writer = await post_and_wait(running, "hold", stream=True)
        await until(is_inside.is_set)
        (request_id,) = running.service.generations._running
        if is_closed:
            writer.close()
            await until(lambda: running.service.generations.num_running == 0)
        else:
            assert running.service.generations.cancel(request_id)
        may_go_on.set()
        await until(lambda id=request_id: any(r.request_id == id for r in running.engine.requests))  # type: ignore[misc]
        await until(lambda: is_all_free(running))
        writer.close()


async def test_while_the_model_loads(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models) as running:
        writer = await post_and_wait(running, "say hi", stream=True)
        await until(lambda: len(running.service.models._waiters) == 1)
        writer.close()
        await until(lambda: all(waiter.future.done() for waiter in running.service.models._waiters))
        models.load_gate.set()
        await running.ready()
        assert running.engine.requests == []
        assert (await running.complete("say hi")).status_code == 200


async def test_half_closing_counts_as_leaving(running: Running) -> None:
    writer = await post_and_wait(running, "hold", stream=True)
    await until(lambda: running.engine.num_active == 1)
    writer.write_eof()
    await until(lambda: is_all_free(running))
    writer.close()


async def test_a_reader_that_stops_reading_is_cancelled_and_nobody_else_is_harmed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputStream.__init__, "__defaults__", (64,))
    models = FakeModels(fake_installed(context_tokens=10_000_000))
    async with running_service(models) as running:
        await running.ready()
        writer = await post_and_wait(running, f"say {'x' * 200_000}", stream=True)
        await until(lambda: running.engine.num_active == 1)
        assert (await running.complete("say hi")).status_code == 200
        await until(lambda: running.engine.num_active == 0)
        writer.close()
        await until(lambda: is_all_free(running))


async def test_a_stopped_stream_ends_with_an_error_and_the_id_is_known(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hold"}], "stream": True}
    async with running.unix.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = answer.aiter_lines()
        first = json.loads((await anext(events)).removeprefix("data: "))
        stopped = await running.unix.post("/chatkv/cancel", json={"request_id": first["id"]})
        assert stopped.status_code == 200
        rest = [line async for line in events if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
    unknown = await running.unix.post("/chatkv/cancel", json={"request_id": "unknown"})
    assert unknown.status_code == 404


async def test_a_cancelled_answer_is_not_asked_for_again(running: Running) -> None:
    """OpenAI's SDKs re-send a 409 twice, unless this header says no."""
    waiting = asyncio.create_task(running.complete("hold"))
    await until(lambda: running.engine.num_active == 1)
    (request_id,) = running.service.generations._running
    await running.client.cancel_request(request_id)
    refused = await waiting
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cancelled")
    assert refused.headers["x-should-retry"] == "false"


async def test_full_queue_is_429_and_says_when_to_try_again(running: Running) -> None:
    running.engine.step_gate.clear()
    writers = [await post_and_wait(running, "hold", stream=True) for _ in range(4)]
    await until(lambda: running.engine.stats().num_waiting == 4)
    refused = await running.complete("say hi")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "queue_full"
    for writer in writers:
        writer.close()
    await until(lambda: is_all_free(running))
