"""Time to the first token of a chat of 4,000 tokens that left the device in other ways than by a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.running_service import RunningService

from .report import Report, median
from .text import prompt_of

NUM_TOKENS = 4000
BLOCK_IMAGE_BYTES = 368_640
"""Of the default model in fp16, for the size of a pool that holds one such chat and not two."""
POOL_TOKENS = 6400
NUM_TURNS = 3


def chat(seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt_of(NUM_TOKENS, seed=seed)}]


async def measure(home: Path, report: Report) -> None:
    cold_s = await after_pressure(home, report)
    await after_unload(home, report, cold_s)


async def after_pressure(home: Path, report: Report) -> float:
    """Two chats take turns in a pool that holds one of them. Returns the cold time of a chat."""
    size = POOL_TOKENS // 16 * BLOCK_IMAGE_BYTES
    service = RunningService(home, CHATKV_KV_BYTES=str(size), CHATKV_CONTEXT_TOKENS=str(POOL_TOKENS))
    seeds = (9_001, 9_002)
    try:
        await service.start()
        cold_s = median([(await service.chat(chat(seed), 1)).ttft_s for seed in seeds])
        await until_stored(service)
        turns = [await service.chat(chat(seed), 1) for _ in range(NUM_TURNS) for seed in seeds]
    finally:
        service.stop()
    ttft_s = median([turn.ttft_s for turn in turns])
    report.add("TTFT cold, 4000 tokens, in the pool of the next line", cold_s, "s")
    report.add("TTFT after another chat took the pool", ttft_s, "s", against=cold_s, limit="<= 0.5 s, ratio <= 0.05")
    report.add("fewest tokens not computed then", min(turn.num_cached_tokens for turn in turns), "tok")
    return cold_s


async def after_unload(home: Path, report: Report, cold_s: float) -> None:
    """Once with a model that is ready again, and once by the request that has to load the model first."""
    service = RunningService(home, CHATKV_IDLE_UNLOAD_S="1")
    try:
        await service.start()
        await service.chat([{"role": "user", "content": "Hello"}], 1)
        await until_unloaded(service)
        with_model = await service.chat(chat(9_001), 1)
        await until_unloaded(service)
        await service.chat([{"role": "user", "content": "Hello"}], 1)
        alone = await service.chat(chat(9_001), 1)
    finally:
        service.stop()
    limit = "<= 0.5 s, ratio <= 0.05"
    report.add("TTFT after an idle unload, model ready", alone.ttft_s, "s", against=cold_s, limit=limit)
    report.add("the same with the load of the model in it", with_model.ttft_s, "s", against=cold_s)


async def until_stored(service: RunningService) -> None:
    async with service.client() as client:
        while (await client.get("/chatkv/cache")).json()["tiers"]["disk"]["num_queued"]:
            await asyncio.sleep(0.05)


async def until_unloaded(service: RunningService) -> None:
    while (await service.status())["model"]["state"] == "ready":
        await asyncio.sleep(0.05)
