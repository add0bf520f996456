"""What the real model computes again, and what it does not (counts, never times)."""

from __future__ import annotations

import asyncio

from tests.bench.text import prompt_of, words
from tests.running_service import RunningService

SYSTEM_TOKENS = 2000
BLOCK = 16


def conversation(seed: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": prompt_of(SYSTEM_TOKENS, seed)},
        {"role": "user", "content": words(20, seed)},
    ]


async def test_a_second_turn_computes_its_own_text_plus_one_block_at_most(service: RunningService) -> None:
    history = conversation(1)
    first = await service.chat(history, 24, ignore_eos=False)
    assert first.num_prompt_tokens > 1800
    assert first.num_cached_tokens == 0
    history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": words(20, 2)}]
    second = await service.chat(history, 4)
    new_tokens = second.num_prompt_tokens - first.num_prompt_tokens - first.num_tokens
    computed = second.num_prompt_tokens - second.num_cached_tokens
    assert computed <= new_tokens + BLOCK, (computed, new_tokens)


async def test_five_chats_hold_what_they_share_once(service: RunningService) -> None:
    history = conversation(3)
    first = await service.chat(history, 1)
    shared = (first.num_prompt_tokens - 40) // BLOCK

    async def ask(number: int) -> None:
        other = [history[0], {"role": "user", "content": words(12, 100 + number)}]
        timing = await service.chat(other, 100)
        assert timing.num_cached_tokens >= shared * BLOCK

    most_used = 0

    async def watch() -> None:
        nonlocal most_used
        while True:
            status = await service.status()
            if status["num_running"] == 5:
                most_used = max(most_used, status["tiers"]["device"]["num_used_blocks"])
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(ask(number) for number in range(5)))
    watcher.cancel()
    own_blocks = 5 * ((40 + 40 + 100) // BLOCK + 2)
    assert shared < most_used <= shared + own_blocks
