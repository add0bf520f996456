"""E2 on the real model: a client that leaves gives its blocks back, whatever its request was doing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.text import prompt_of, words
from tests.running_service import RunningService

from .conftest import make_home, running_service

LONG = prompt_of(6000, seed=1)
SHORT = words(10, seed=2)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningService]:
    """Runs four sequences at a time, so that a fifth is queued."""
    home = make_home(tmp_path_factory.mktemp("narrow") / "home", models_dir)
    with running_service(home, CHATKV_MAX_NUM_SEQS="4") as running:
        yield running


async def until(service: RunningService, **wanted: int) -> dict[str, Any]:
    while True:
        status = await service.status()
        counts = {"used": status["tiers"]["device"]["num_used_blocks"], **status}
        if all(counts[name] == value for name, value in wanted.items()):
            return status
        await asyncio.sleep(0.01)


async def leave(task: asyncio.Task[Any]) -> None:
    """As curl killed by an editor: the socket closes, whatever was being sent."""
    task.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        await task


async def post(service: RunningService, text: str, **fields: Any) -> None:
    """Runs until it is left."""
    body = {"messages": [{"role": "user", "content": text}], "ignore_eos": True, **fields}
    async with service.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass


@pytest.mark.parametrize(
    ("text", "fields", "num_running"),
    [
        pytest.param(LONG, {"stream": True}, 1, id="prefill"),
        pytest.param(LONG, {"stream": False}, 1, id="prefill, not streaming"),
        pytest.param(SHORT, {"stream": True}, 1, id="decode"),
        pytest.param(SHORT, {"stream": False}, 1, id="decode, not streaming"),
        pytest.param(SHORT, {"stream": True, "n": 4}, 4, id="n = 4"),
        pytest.param(SHORT, {"stream": False, "n": 4}, 4, id="n = 4, not streaming"),
    ],
)
async def test_a_client_that_leaves_frees_its_blocks(
    narrow: RunningService, text: str, fields: dict[str, Any], num_running: int
) -> None:
    task = asyncio.create_task(post(narrow, text, **fields))
    await until(narrow, num_running=num_running)
    await leave(task)
    await until(narrow, num_running=0, num_waiting=0, used=0)


async def test_a_queued_client_that_leaves_is_never_computed(narrow: RunningService) -> None:
    first = asyncio.create_task(post(narrow, SHORT, stream=True, n=4))
    await until(narrow, num_running=4)
    queued = asyncio.create_task(post(narrow, LONG, stream=True))
    await until(narrow, num_waiting=1)
    await leave(queued)
    status = await until(narrow, num_waiting=0)
    assert status["num_running"] == 4
    await leave(first)
    await until(narrow, num_running=0, used=0)
