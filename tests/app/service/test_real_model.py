"""The default model behind the real service: chats, prefixes, restarts."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.client import Client
from chatkv.app.hub.pull import pull
from chatkv.app.paths import Paths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GREEDY = {"temperature": 0.0, "max_tokens": 48}


@pytest.fixture
async def client(home: Path, default_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("CHATKV_PORT", "0")
    monkeypatch.setenv("CHATKV_NICE", "0")
    monkeypatch.setenv("CHATKV_CHECK_INTEGRITY", "1")
    pull(Paths.from_env(), f"file:{default_gguf}", lambda progress: None, name="smollm2-135m")
    async with Client() as client:
        await client.ensure_service()
        yield client
        await client.ensure_service()
        assert await client.stop()


async def finish(client: Client, chat_id: str, text: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    streamed = ""
    async for event in client.stream_turn(chat_id, text):
        streamed += event.get("text", "")
        last = event
    assert last["type"] == "reply_done"
    assert streamed == last["message"]["content"]
    return last["message"]


async def test_second_turns_and_shared_system_prompts_compute_only_what_is_new(client: Client) -> None:
    system = "You are a patient librarian who answers in one sentence. " * 60
    chat = await client.create_chat(system=system, sampling=GREEDY)
    first = await finish(client, chat["id"], "Which book is about whales?")
    second = await finish(client, chat["id"], "Who wrote it?")
    for reply in (first, second):
        assert reply["status"] in ("complete", "length")
        assert reply["content"].strip()
        assert "\ufffd" not in reply["content"]
    stats = second["stats"]
    new_tokens = stats["num_prompt_tokens"] - first["stats"]["num_prompt_tokens"] - first["num_tokens"]
    assert stats["num_prompt_tokens"] - stats["num_cached_tokens"] <= new_tokens + 16
    other = await client.create_chat(system=system, sampling=GREEDY)
    shared = (await finish(client, other["id"], "Is it long?"))["stats"]
    assert shared["num_prompt_tokens"] - shared["num_cached_tokens"] < 48
    (tier, num_blocks), *_ = (await client.cache())["chats"][0]["runs"]
    assert (tier, num_blocks > 0) == ("device", True)


async def test_stateless_history_finds_the_sampled_ids_again(client: Client) -> None:
    messages = [{"role": "user", "content": "Tell me three facts about the moon. " * 12}]
    body: dict[str, Any] = {"messages": messages, "temperature": 1, "seed": 3, "max_tokens": 64, "chatkv": True}
    first = (await client._http.post("/v1/chat/completions", json=body, timeout=300)).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And the sun?"}]
    second = (await client._http.post("/v1/chat/completions", json=body, timeout=300)).json()
    usage = second["usage"]
    held = first["usage"]["total_tokens"] // 16 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] >= held - 16
    assert second["chatkv"]["cached_by_tier"] == {"device": usage["prompt_tokens_details"]["cached_tokens"]}


async def test_kill_9_in_a_reply_keeps_it_and_continues_from_its_ids(client: Client) -> None:
    chat = await client.create_chat(sampling={"temperature": 0.0, "max_tokens": 200})
    await client.send_turn(chat["id"], "Write a long story about a lighthouse.")
    arrivals: list[tuple[float, int]] = []
    async for event in client.events():
        if event["type"] == "reply_delta":
            arrivals.append((time.monotonic(), event["offset"] + len(event["text"])))
            if len(arrivals) == 40:
                break
    killed_at = time.monotonic()
    os.kill((await client.status())["pid"], signal.SIGKILL)
    await client.ensure_service()
    kept = (await client.get_chat(chat["id"]))["messages"][-1]
    assert kept["status"] == "stopped"
    assert len(kept["content"]) >= max(length for at, length in arrivals if at <= killed_at - 0.25)
    await client.continue_reply(chat["id"])
    async for event in client.events():
        state = (await client.get_chat(chat["id"]))["chat"]["state"]
        if event["type"] == "reply_done" or state == "idle":
            break
    whole = (await client.get_chat(chat["id"]))["messages"][-1]
    assert whole["id"] == kept["id"]
    assert whole["content"].startswith(kept["content"])
    assert len(whole["content"]) > len(kept["content"])


async def test_a_megabyte_of_text_does_not_hold_up_another_chats_tokens(client: Client) -> None:
    gaps: list[float] = []
    last = 0.0
    is_posted = False
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 120, "ignore_eos": True}
    large = {"messages": [{"role": "user", "content": "word and another " * 60_000}]}
    async for chunk in client.stream_completion(body):
        now = time.monotonic()
        if last:
            gaps.append(now - last)
        last = now
        if len(gaps) == 20 and not is_posted:
            is_posted = True
            refused = await client._http.post("/v1/chat/completions", json=large)
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            last = time.monotonic()
        del chunk
    assert statistics.quantiles(gaps, n=100)[98] <= 0.5
