"""Resident memory of a pair with eight chats of 8k tokens, and our store's resume.

llama-server writes to all of its KV cache when it starts, so it is measured then, after a short chat in each slot:
filling the contexts would add nothing. Our pool becomes resident as it is filled, so it is filled: first with eight
chats of 8k tokens that share a system prompt, then with short chats until no block is free. A full pool of eight
times 8k tokens is what eight chats take that share nothing, and short ones take less time to compute.
"""

from __future__ import annotations

import asyncio
from itertools import count

from .kept_blocks import kv_folder
from .page_cache import drop_page_cache
from .peer_client import Messages
from .peer_report import add_compared
from .peer_servers import CONTEXT_TOKENS, NUM_CHATS, OurServer, Pair
from .peer_speed import user
from .report import Report, median
from .text import prompt_of, words

SYSTEM_TOKENS = 2000
FULL_TOKENS = 8050
"""About: such a prompt and the template's part stay below 8,192."""
SHORT_TOKENS = 1000
BLOCK_TOKENS = 16
RESUMED_TOKENS = 4000
RESUME_LIMIT = "<= 0.025"
MEMORY_LIMITS = {
    "full": "<= 1.25",
    "sharing a system prompt": "<= 1",
    "full, int8 KV": "<= 0.8",
}


async def measure_memory(pair: Pair, report: Report) -> None:
    try:
        await pair.llama.start()
        await asyncio.gather(*(pair.llama.chat(user(words(24, seed=chat)), 8) for chat in range(NUM_CHATS)))
        llama = pair.llama.memory_bytes()
    finally:
        pair.llama.stop()
    for kind, value in llama.items():
        report.add(f"{kind}, {NUM_CHATS} x 8k contexts, {pair.llama.name}", value / 2**20, "MiB")
    if not pair.with_ours:
        return
    ours = {**await fill_sharing(pair), **await fill_int8(pair)}
    for name, limit in MEMORY_LIMITS.items():
        for kind, value in ours[name].items():
            add_compared(report, f"{kind}, {name}, chatkv", value / 2**20, "MiB", llama[kind] / 2**20, limit)


async def fill_sharing(pair: Pair) -> dict[str, dict[str, int]]:
    server = await with_sized_pool(pair)
    try:
        system = {"role": "system", "content": prompt_of(SYSTEM_TOKENS, seed=400_000)}
        for chat in range(NUM_CHATS):
            rest = {"role": "user", "content": prompt_of(FULL_TOKENS - SYSTEM_TOKENS, seed=401_000 + chat)}
            await server.chat([system, rest], 1)
        await until_stored(server)
        sharing = server.memory_bytes()
        await fill_pool(server)
        return {"sharing a system prompt": sharing, "full": server.memory_bytes()}
    finally:
        server.stop()


async def fill_int8(pair: Pair) -> dict[str, dict[str, int]]:
    server = await with_sized_pool(pair, CHATKV_KV_DTYPE="int8")
    try:
        await server.chat(user(prompt_of(FULL_TOKENS, seed=410_000)), 1)
        await fill_pool(server)
        return {"full, int8 KV": server.memory_bytes()}
    finally:
        server.stop()


async def with_sized_pool(pair: Pair, **settings: str) -> OurServer:
    """Started with a pool of eight times 8k tokens, to the block."""
    asked = pair.make_ours(**settings)
    try:
        await asked.start()
        block_bytes = (await asked.status("/chatkv/cache"))["block_bytes"]
    finally:
        asked.stop()
    pool_bytes = NUM_CHATS * CONTEXT_TOKENS // BLOCK_TOKENS * block_bytes
    server = pair.make_ours(CHATKV_KV_BYTES=str(pool_bytes), **settings)
    await server.start()
    return server


async def fill_pool(server: OurServer) -> None:
    """Short chats of other words each, until one needs more blocks than are free."""
    for chat in count():
        num_free = (await server.status("/chatkv/cache"))["num_free"]
        await server.chat(user(prompt_of(SHORT_TOKENS, seed=420_000 + chat)), 1)
        if num_free < SHORT_TOKENS // BLOCK_TOKENS:
            break
    await until_stored(server)


async def measure_resume(pair: Pair, report: Report) -> None:
    """Chats of 4,000 tokens, computed; then, after a restart, with nothing of the store in the system's page cache."""
    if not pair.with_ours:
        return
    prompts: list[Messages] = [user(prompt_of(RESUMED_TOKENS, seed=500_000 + number)) for number in range(pair.repeats)]
    server = pair.make_ours()
    try:
        await server.start()
        cold_s = median([(await server.chat(prompt, 1)).ttft_s for prompt in prompts])
        await until_stored(server)
        server.stop()
        drop_page_cache(kv_folder(pair.home))
        await server.start()
        resumed = [await server.chat(prompt, 1) for prompt in prompts]
    finally:
        server.stop()
    report.add(f"TTFT computed, {RESUMED_TOKENS} tokens, chatkv", cold_s, "s")
    add_compared(
        report,
        f"TTFT after a restart, {RESUMED_TOKENS} tokens, chatkv",
        median([timing.ttft_s for timing in resumed]),
        "s",
        cold_s,
        RESUME_LIMIT,
    )
    computed = [timing.num_prompt_tokens - timing.num_cached_tokens for timing in resumed]
    report.add("most tokens computed then", max(computed), "tok")


async def until_stored(server: OurServer) -> None:
    while (await server.status("/chatkv/cache"))["tiers"]["disk"]["num_queued"]:
        await asyncio.sleep(0.05)
    await server.settle()
