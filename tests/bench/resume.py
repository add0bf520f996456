"""`python -m tests.bench.resume`: what it costs to keep KV, and what it gives back.

Time to the first token cold, from the device and from disk; a draft computed while it is typed; then, with the engine
in this process, the cost of saving, the speed of reading back and the length from which loading beats computing; last
the store alone (`python -m tests.bench.store`).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path
from typing import Any

from tests.running_service import ROOT, RunningService

from . import resume_after, resume_engine, store
from .draft import measure_draft
from .page_cache import drop_page_cache
from .report import Report, median
from .text import prompt_of, words

LENGTHS = {1000: 3, 4000: 3, 7800: 1}
"""Tokens of a prompt -> how many such prompts. The last is about all that the default model can hold."""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompts() -> dict[int, list[list[dict[str, str]]]]:
    return {
        length: [user(prompt_of(length, seed=length + number)) for number in range(count)]
        for length, count in LENGTHS.items()
    }


async def first_tokens(service: RunningService, length: int) -> tuple[float, int]:
    """Median time to the first token of the prompts of this length, and how many of their tokens were not computed."""
    timings = [await service.chat(messages, 1) for messages in prompts()[length]]
    return median([timing.ttft_s for timing in timings]), min(timing.num_cached_tokens for timing in timings)


async def cache_of(service: RunningService) -> dict[str, Any]:
    async with service.client() as client:
        return dict((await client.get("/chatkv/cache")).json())


async def measure_first_token(service: RunningService, report: Report) -> None:
    cold = {length: (await first_tokens(service, length))[0] for length in LENGTHS}
    device = {length: (await first_tokens(service, length))[0] for length in LENGTHS}
    while (await cache_of(service))["tiers"]["disk"]["num_queued"]:
        await asyncio.sleep(0.05)
    service.stop()
    drop_page_cache(service.home / "cache" / "kv")
    await service.start()
    await service.chat(user("Hello"), 8)
    for length in LENGTHS:
        report.add(f"TTFT cold, {length} tokens", cold[length], "s")
        report.add(f"TTFT device, {length} tokens", device[length], "s", against=cold[length])
        disk, num_cached = await first_tokens(service, length)
        limit = "<= 0.5 s, ratio <= 0.05" if length == 4000 else ""
        report.add(f"TTFT disk, {length} tokens", disk, "s", against=cold[length], limit=limit)
        report.add(f"tokens not computed, disk, {length} tokens", num_cached, "tok")


async def measure_bytes(service: RunningService, report: Report) -> None:
    cache = await cache_of(service)
    disk = cache["tiers"]["disk"]
    per_block = disk["used_bytes"] / disk["num_blocks"]
    report.add("bytes on disk per 1k tokens", per_block / cache["block_size"] * 1000 / 1e6, "MB")
    report.add("bytes on disk per byte of KV", per_block / cache["block_bytes"], "", limit="<= 1.05")


async def run_service(home: Path, report: Report) -> None:
    service = RunningService(home)
    service.install_model()
    shutil.rmtree(home / "cache" / "kv", ignore_errors=True)
    try:
        await service.start()
        await service.chat(user(words(20, seed=1)), 8)
        await measure_first_token(service, report)
        await measure_bytes(service, report)
        await measure_draft(service, report)
    finally:
        service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-home", help="kept between runs")
    home = parser.parse_args().home.absolute()
    report = Report()
    asyncio.run(run_service(home, report))
    asyncio.run(resume_after.measure(home, report))
    resume_engine.measure(home, report)
    store.measure(home / "bench-store", report)
    report.print_table()


if __name__ == "__main__":
    main()
