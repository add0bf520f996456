"""What leaves no trace on disk: a chat that was forgotten, a draft that was not sent, a private chat; and anything in
clear once encryption is on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chatkv.engine.text.tokenizer import Tokenizer
from tests.bench.text import words
from tests.engine.faults.traces import traces_below
from tests.running_service import MODEL, RunningService

from .conftest import make_home, running_service
from .kv_chats import disk, until_stored

NUM_WORDS = 90
"""More than five blocks."""


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningService]:
    with running_service(make_home(tmp_path_factory.mktemp("keeper") / "home", models_dir)) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(models_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(models_dir / MODEL)


def traces(service: RunningService, tokenizer: Tokenizer, text: str) -> list[str]:
    """In the files of the store. Ids of the text's middle: its ends may join with what stands around it."""
    token_ids = tokenizer.encode_run(text)[8:-8]
    sentences = [sentence.encode() for sentence in text.split(". ")[1:-1]]
    return traces_below(service.home / "cache" / "kv", token_ids, sentences)


async def new_chat(service: RunningService, **fields: Any) -> str:
    body = {"sampling": {"max_tokens": 2, "temperature": 0}, **fields}
    async with service.client() as client:
        answer = await client.post("/chatkv/chats", json=body)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["chat"]["id"])


async def say(service: RunningService, chat_id: str, text: str) -> None:
    """Until the reply is there."""
    async with service.client() as client:
        body = {"text": text, "stream": True}
        async with client.stream("POST", f"/chatkv/chats/{chat_id}/turns", json=body) as answer:
            assert answer.status_code < 300, await answer.aread()
            types = [json.loads(line[6:])["type"] async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert types[-1] == "reply_done", types


async def post(service: RunningService, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with service.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code < 300, answer.text
    return dict(answer.json())


async def until_idle(service: RunningService) -> None:
    while (status := await service.status())["num_running"] or status["num_waiting"]:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["forget", "delete"])
async def test_a_forgotten_chat_leaves_no_trace_in_the_store(
    keeper: RunningService, tokenizer: Tokenizer, way: str
) -> None:
    text = words(NUM_WORDS, seed=len(way) * 31)
    chat_id = await new_chat(keeper)
    await say(keeper, chat_id, text)
    await until_idle(keeper)
    await until_stored(keeper)
    assert traces(keeper, tokenizer, text), "the control finds nothing"
    if way == "forget":
        forgotten = await post(keeper, "/chatkv/cache/forget", {"chat_id": chat_id})
    else:
        async with keeper.client() as client:
            forgotten = (await client.delete(f"/chatkv/chats/{chat_id}")).json()["cache"]
    assert forgotten["num_removed"] >= 5, forgotten
    assert traces(keeper, tokenizer, text) == []


async def test_a_draft_that_is_not_sent_never_reaches_the_store(keeper: RunningService, tokenizer: Tokenizer) -> None:
    chat_id = await new_chat(keeper)
    await say(keeper, chat_id, "Hello.")
    await until_idle(keeper)
    await until_stored(keeper)
    num_blocks = (await disk(keeper))["num_blocks"]
    text = words(NUM_WORDS, seed=5)
    for length in (len(text) // 2, len(text)):
        assert (await post(keeper, f"/chatkv/chats/{chat_id}/warm", {"draft": text[:length]}))["is_started"]
    while True:  # Until it was computed: its blocks are what the device has more than the disk.
        async with keeper.client() as client:
            cache = (await client.get("/chatkv/cache")).json()
        if cache["num_cached"] >= num_blocks + 5:
            break
        await asyncio.sleep(0.02)
    await until_idle(keeper)
    await until_stored(keeper)
    assert (await disk(keeper))["num_blocks"] == num_blocks
    assert traces(keeper, tokenizer, text) == []
    await say(keeper, chat_id, text)
    await until_idle(keeper)
    await until_stored(keeper)
    assert traces(keeper, tokenizer, text), "what was sent is kept"


async def test_a_private_chat_never_reaches_the_store(keeper: RunningService, tokenizer: Tokenizer) -> None:
    num_blocks = (await disk(keeper))["num_blocks"]
    text = words(NUM_WORDS, seed=6)
    await say(keeper, await new_chat(keeper, private=True), text)
    await until_idle(keeper)
    await until_stored(keeper)
    assert (await disk(keeper))["num_blocks"] == num_blocks
    assert traces(keeper, tokenizer, text) == []


@asynccontextmanager
async def started(home: Path, **settings: str) -> AsyncIterator[RunningService]:
    running = RunningService(home, **settings)
    try:
        await running.start()
        yield running
    finally:
        running.stop()


@pytest.mark.slow
async def test_with_encryption_on_nothing_is_ever_there_in_clear(e2e_home: Path, tokenizer: Tokenizer) -> None:
    text = words(NUM_WORDS, seed=7)
    async with started(e2e_home, CHATKV_KV_ENCRYPTION="true") as sealed:
        chat_id = await new_chat(sealed)
        await say(sealed, chat_id, text)
        await until_idle(sealed)
        await until_stored(sealed)
        assert (await disk(sealed))["num_blocks"] >= 5
        assert traces(sealed, tokenizer, text) == []
        await post(sealed, "/chatkv/cache/forget", {"chat_id": chat_id})
        assert traces(sealed, tokenizer, text) == []


@pytest.mark.slow
async def test_a_second_service_on_the_same_store_keeps_chats_in_memory_and_says_so(
    keeper: RunningService, e2e_home: Path
) -> None:
    (e2e_home / "cache").mkdir(mode=0o700)
    (e2e_home / "cache" / "kv").symlink_to(keeper.home / "cache" / "kv")
    async with started(e2e_home) as second:
        await say(second, await new_chat(second), "Hello.")
        async with second.client() as client:
            found = (await client.get("/chatkv/cache")).json()["tiers"]["disk"]
    assert found["state"] == "memory_only"
    assert "another" in found["notice"]
