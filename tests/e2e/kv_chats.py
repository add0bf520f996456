"""Asks a service and keeps all that tells a restored answer from a computed one: every token with its exact
log-probability, and which tier the prompt came from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.text import prompt_of, words
from tests.running_service import RunningService

BLOCK = 16
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    tokens: tuple[tuple[bytes, float], ...]
    """(bytes, log-probability) of each sampled token. Equal floats mean equal bits of what the model computed."""
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    cached_by_tier: Mapping[str, int]

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


async def ask(service: RunningService, messages: Messages, num_tokens: int, model: str = "") -> Reply:
    """Exactly `num_tokens` greedy tokens."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "chatkv": True,
    }
    async with service.client() as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    choice, usage = content["choices"][0], content["usage"]
    return Reply(
        tuple((bytes(token["bytes"]), token["logprob"]) for token in choice["logprobs"]["content"]),
        choice["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        content["chatkv"]["cached_by_tier"],
    )


def opening(num_tokens: int, seed: int) -> Messages:
    """A chat's first turn; `num_tokens` and a few."""
    return [
        {"role": "system", "content": prompt_of(num_tokens, seed)},
        {"role": "user", "content": words(16, seed)},
    ]


def next_turn(messages: Messages, reply: Reply, seed: int) -> Messages:
    return [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": words(16, seed)}]


async def restart(service: RunningService) -> None:
    await asyncio.to_thread(service.stop)
    await service.start()


async def until_stored(service: RunningService) -> None:
    """Nothing waits to be written any more."""
    while (await disk(service))["num_queued"]:
        await asyncio.sleep(0.02)


async def disk(service: RunningService) -> dict[str, Any]:
    async with service.client() as client:
        found: dict[str, Any] = (await client.get("/chatkv/cache")).json()["tiers"]["disk"]
    assert found["state"] == "on", found
    return found


def check_resumed(first: Reply, second: Reply, expected: Reply, tier: str) -> None:
    """`second` came after `first` in the same chat and found the chat in `tier`; `expected` is the same turn of a
    service that never forgot anything."""
    assert second.tokens == expected.tokens, "a restored answer differs from the one that was never interrupted"
    assert second.num_prompt_tokens == expected.num_prompt_tokens
    num_new = second.num_prompt_tokens - first.num_prompt_tokens - len(first.tokens)
    assert second.num_computed_tokens <= num_new + 2 * BLOCK, (second, num_new)
    assert second.cached_by_tier.get(tier, 0) >= first.num_prompt_tokens - 2 * BLOCK, second.cached_by_tier
