"""kill -9 at random moments under load: what comes back is right, and hardly anything is lost."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.bench.text import words
from tests.running_service import RunningService

from .kv_chats import BLOCK, Messages, Reply, ask, opening

NUM_KILLS = 50
NUM_CONVERSATIONS = 6
NUM_TURNS = 3
NUM_ANSWER_TOKENS = 8
MAX_LOAD_S = 5.5
SAFE_AFTER_S = 2.0
"""What was answered this long before the kill is on disk."""


@dataclass(frozen=True)
class Turn:
    messages: Messages
    reply: Reply
    """Of a service that was never killed."""


@dataclass
class Load:
    """Several clients at once, until the service dies under them."""

    service: RunningService
    turns: list[Turn]
    random: Random
    sent: dict[str, str]
    """Message id -> text, of every turn that the service has accepted. Outlives the rounds."""
    chat_of: dict[str, str]
    answered_at: dict[int, float] = field(default_factory=dict)
    """Index of a turn -> when its answer was complete."""

    async def run(self) -> None:
        with suppress(httpx.HTTPError):
            async with asyncio.TaskGroup() as group:
                for client in (self._ask, self._ask, self._write, self._delete):
                    group.create_task(self._until_dead(client))

    async def _until_dead(self, client: Any) -> None:
        with suppress(httpx.HTTPError):
            while True:
                await client()

    async def _ask(self) -> None:
        index = self.random.randrange(len(self.turns))
        turn = self.turns[index]
        reply = await ask(self.service, turn.messages, NUM_ANSWER_TOKENS)
        assert reply.tokens == turn.reply.tokens
        self.answered_at[index] = time.monotonic()

    async def _write(self) -> None:
        text = f"message {self.random.getrandbits(64):x}"
        async with self.service.client() as client:
            chat = (await client.post("/chatkv/chats", json={"sampling": {"max_tokens": 4}})).json()["chat"]
            body = {"text": text, "stream": True}
            async with client.stream("POST", f"/chatkv/chats/{chat['id']}/turns", json=body) as answer:
                async for line in answer.aiter_lines():
                    event = json.loads(line[6:]) if line.startswith("data: {") else {}
                    if event.get("type") == "turn":
                        self.sent[event["message"]["id"]] = text
                        self.chat_of[event["message"]["id"]] = chat["id"]

    async def _delete(self) -> None:
        """A chat comes and goes: its blocks are written and forgotten while the others work."""
        async with self.service.client() as client:
            chat = (await client.post("/chatkv/chats", json={"sampling": {"max_tokens": 4}})).json()["chat"]
            text = opening(64, self.random.getrandbits(32))[0]["content"]
            body = {"text": text, "stream": True}
            await client.post(f"/chatkv/chats/{chat['id']}/turns", json=body)
            await client.delete(f"/chatkv/chats/{chat['id']}")


async def reference(service: RunningService) -> list[Turn]:
    """Conversations whose answers are a script's: so a prompt's ids do not depend on what a service has sampled."""
    turns = []
    for number in range(NUM_CONVERSATIONS):
        messages = opening(100 + 20 * number, seed=500 + number)
        for turn in range(NUM_TURNS):
            turns.append(Turn(messages, await ask(service, messages, NUM_ANSWER_TOKENS)))
            seed = 10 * number + turn
            scripted = {"role": "assistant", "content": words(12, seed=700 + seed)}
            messages = [*messages, scripted, {"role": "user", "content": words(16, seed=800 + seed)}]
    return turns


async def check_store(service: RunningService) -> None:
    """Every record of every slab, read and proven."""
    async with service.client() as client:
        events = (await client.post("/chatkv/cache/verify")).text
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert found[-1]["type"] == "done", found[-1]
    assert found[-1]["num_damaged"] == 0, found[-1]


async def check_messages(service: RunningService, load: Load) -> None:
    async with service.client() as client:
        for chat_id in set(load.chat_of.values()):
            found = (await client.get(f"/chatkv/chats/{chat_id}")).json()["messages"]
            texts = {message["id"]: message["content"] for message in found}
            for message_id, text in load.sent.items():
                if load.chat_of[message_id] == chat_id:
                    assert texts.get(message_id) == text, "a message was lost"


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_b5_killed_at_50_moments_nothing_is_wrong_and_2_s_of_blocks_are_lost_at_most(
    service: RunningService, e2e_home: Path
) -> None:
    seed = 20_240_607
    random = Random(seed)
    turns = await reference(service)
    killed = RunningService(e2e_home, CHATKV_CHECK_INTEGRITY="true")
    load = Load(killed, turns, random, {}, {})
    safe: list[int] = []
    num_resumed = 0
    try:
        for number in range(NUM_KILLS):
            await killed.start()
            where = f"seed {seed}, kill {number}"
            for index in safe:
                reply = await ask(killed, turns[index].messages, NUM_ANSWER_TOKENS)
                assert reply.tokens == turns[index].reply.tokens, where
                assert reply.num_computed_tokens <= 2 * BLOCK, (where, index, reply)
                num_resumed += reply.cached_by_tier.get("disk", 0) > 0
            for index in random.sample(range(len(turns)), 2):
                reply = await ask(killed, turns[index].messages, NUM_ANSWER_TOKENS)
                assert reply.tokens == turns[index].reply.tokens, where
            await check_messages(killed, load)
            await check_store(killed)
            if random.random() < 0.3:
                async with killed.client() as client:
                    assert (await client.post("/chatkv/cache/clear")).status_code == 200
            load.answered_at = {}
            running = asyncio.create_task(load.run())
            await asyncio.sleep(random.uniform(0.0, MAX_LOAD_S))
            killed_at = time.monotonic()
            killed.kill()
            await running
            safe = [index for index, at in load.answered_at.items() if at < killed_at - SAFE_AFTER_S]
    finally:
        killed.stop()
    assert num_resumed > NUM_KILLS // 4, "hardly anything was ever resumed: nothing was proven"
    assert load.sent
