"""`python -m tests.bench`: the figures of one service on this machine, medians, ratios within one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from pathlib import Path

from tests.running_service import ROOT, RunningService, Timing

from .kept_blocks import forget_store
from .report import Report, median, percentile
from .text import prompt_of, words

REPEATS = 3


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def measure_prefill(service: RunningService, report: Report) -> None:
    for num_tokens in (256, 1000, 2000, 4000):
        rates, lengths = [], []
        for repeat in range(REPEATS if num_tokens < 4000 else 1):
            timing = await service.chat(user(prompt_of(num_tokens, seed=num_tokens + repeat)), 1)
            rates.append((timing.num_prompt_tokens - timing.num_cached_tokens) / timing.ttft_s)
            lengths.append(timing.num_prompt_tokens)
        report.add(f"prefill, {lengths[0]} tokens", median(rates), "tok/s")


async def measure_decode(service: RunningService, report: Report) -> None:
    alone = 0.0
    for num_chats in (1, 4, 8):
        totals = []
        for repeat in range(REPEATS):
            started = time.perf_counter()
            jobs = [
                service.chat(user(words(24, seed=1000 * num_chats + 10 * repeat + chat)), 64)
                for chat in range(num_chats)
            ]
            timings = await asyncio.gather(*jobs)
            first = min(timing.ttft_s for timing in timings)
            totals.append(sum(t.num_tokens for t in timings) / (time.perf_counter() - started - first))
        if num_chats == 1:
            alone = median(totals)
        limit = "ratio >= 3" if num_chats == 8 else ""
        report.add(f"decode, {num_chats} chats", median(totals), "tok/s", against=alone, limit=limit)


async def measure_reuse(service: RunningService, report: Report) -> None:
    cold, second, shared = [], [], []
    for repeat in range(REPEATS):
        system = {"role": "system", "content": prompt_of(1900, seed=77 + repeat)}
        history = [system, {"role": "user", "content": words(60, seed=repeat)}]
        first = await service.chat(history, 24)
        cold.append(first)
        history += [{"role": "assistant", "content": first.text}, {"role": "user", "content": words(18, seed=repeat)}]
        second.append(await service.chat(history, 24))
        shared.append(await service.chat([system, {"role": "user", "content": words(20, seed=900 + repeat)}], 24))
    report.add(f"TTFT cold, {cold[0].num_prompt_tokens} tokens", median([t.ttft_s for t in cold]), "s")
    reference = median([t.ttft_s for t in cold])
    for name, timings in (("second turn", second), ("shared system prompt", shared)):
        ttft = median([t.ttft_s for t in timings])
        computed = median([float(t.num_prompt_tokens - t.num_cached_tokens) for t in timings])
        report.add(f"TTFT {name}", ttft, "s", against=reference, limit="ratio <= 0.1")
        report.add(f"computed tokens, {name}", computed, "tok")


async def measure_gaps(service: RunningService, report: Report) -> None:
    """One chat writes; beside it another reads 4,000 tokens, and one posts 1 MB that cannot fit."""

    async def writer(seed: int) -> Timing:
        return await service.chat(user(words(20, seed=seed)), 160)

    async def read_long() -> None:
        await asyncio.sleep(0.5)
        await service.chat(user(prompt_of(4000, seed=4242)), 1)

    async def post_big() -> None:
        await asyncio.sleep(0.5)
        for number in range(3):
            with contextlib.suppress(RuntimeError):  # refused: longer than the context
                await service.chat(user(words(160_000, seed=number)), 1)

    for name, other in (("a 4,000-token prompt", read_long), ("1 MB posts", post_big)):
        timing, _ = await asyncio.gather(writer(len(name)), other())
        report.add(f"p99 gap beside {name}", percentile(timing.gaps_s, 0.99), "s", limit="<= 0.5")
        report.add(f"longest gap beside {name}", max(timing.gaps_s), "s")


async def measure_slots(service: RunningService, report: Report) -> None:
    """Unused slots while eight chats of 200 tokens and more run."""
    shares: list[float] = []

    async def watch() -> None:
        while True:
            status = await service.status()
            if status["num_running"] == 8 and status["num_waiting"] == 0:
                shares.append(status["unused_slot_share"])
            await asyncio.sleep(0.1)

    watcher = asyncio.create_task(watch())
    # Lengths differ, as those of people's chats do: chats in step would fill and begin their blocks together.
    await asyncio.gather(*(service.chat(user(prompt_of(200 + 37 * chat, seed=50 + chat)), 96) for chat in range(8)))
    watcher.cancel()
    report.add("unused slots, 8 chats of 200+ tokens, mean", 100 * sum(shares) / len(shares), "%", limit="< 4 %")
    report.add("unused slots, 8 chats of 200+ tokens, worst moment", 100 * max(shares), "%")


async def run(home: Path) -> None:
    report = Report()
    service = RunningService(home)
    service.install_model()
    try:
        forget_store(home)
        await service.start()
        report.add("start-up, socket answers", service.listening_s, "s")
        report.add("start-up, model ready", service.ready_s, "s")
        await service.chat(user("Hello"), 8)
        report.add("resident memory after start", service.resident_bytes() / 2**20, "MiB")
        for measure in (measure_decode, measure_prefill, measure_reuse, measure_gaps, measure_slots):
            await measure(service, report)
        report.add("resident memory at the end", service.resident_bytes() / 2**20, "MiB")
    finally:
        service.stop()
    report.print_table()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-home", help="kept between runs")
    asyncio.run(run(parser.parse_args().home))
