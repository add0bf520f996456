"""A pair beside busy programs, a pair at rest, and how each starts."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from .peer_report import Samples, add_compared, judged
from .peer_servers import LlamaServer, OurServer, Pair, Server
from .peer_speed import rate_together, user
from .report import Report, median, percentile
from .text import words

NUM_BUSY = 2
NUM_DECODED = 128
IDLE_S = 30.0
UNTIL_REST_S = 10.0
"""What a last request leaves to do is done by then, for both."""
MAX_GAP_MS = 50
MAX_IDLE_MS = 1.0
"""Reading the figures themselves is nobody's; a timer of an event loop is about a tenth of this."""
USUAL_NICE = "5"


@contextlib.contextmanager
def busy_programs() -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


async def measure_load(pair: Pair, report: Report) -> None:
    """At equal priority first; then ours alone as it runs by itself, behind other programs."""
    rates, p50s, p99s = Samples(), Samples(), Samples()

    async def measure(server: Server, name: str, repeat: int) -> None:
        with busy_programs():
            timing = await server.chat(user(words(24, seed=300_000 + repeat)), NUM_DECODED)
        await server.settle()
        gaps_ms = [1000 * gap for gap in timing.gaps_s]
        rates.add("decode under load", name, rate_together([timing]))
        p50s.add("p50 gap under load", name, percentile(gaps_ms, 0.5))
        p99s.add("p99 gap under load", name, percentile(gaps_ms, 0.99))

    async with pair.running() as servers:
        for repeat in range(pair.repeats):
            for server in servers:
                await measure(server, server.name, repeat)
    rates.report(report, "tok/s", {"decode under load": ">= 5"})
    p50s.report(report, "ms", {})
    for name, values in p99s.values["p99 gap under load"].items():
        limit = judged(median(values), f"<= {MAX_GAP_MS}") if name == OurServer.name else ""
        report.add(f"p99 gap under load, {name}", median(values), "ms", limit=limit)
    if pair.with_ours:
        await measure_usual_priority(pair, report)


async def measure_usual_priority(pair: Pair, report: Report) -> None:
    server = pair.make_ours(CHATKV_NICE=USUAL_NICE)
    try:
        await server.start()
        with busy_programs():
            timings = [
                await server.chat(user(words(24, seed=310_000 + repeat)), NUM_DECODED) for repeat in range(pair.repeats)
            ]
    finally:
        server.stop()
    rate = median([rate_together([timing]) for timing in timings])
    p99_ms = median([1000 * percentile(timing.gaps_s, 0.99) for timing in timings])
    report.add(f"decode under load, {server.name} at nice {USUAL_NICE}", rate, "tok/s")
    report.add(f"p99 gap under load, {server.name} at nice {USUAL_NICE}", p99_ms, "ms")


async def measure_idle(pair: Pair, report: Report) -> None:
    async with pair.running() as servers:
        await asyncio.sleep(UNTIL_REST_S)
        before = [server.cpu_ns() for server in servers]
        await asyncio.sleep(IDLE_S)
        for server, cpu_ns in zip(servers, before, strict=True):
            used_ms = 1000 * server.used_s(cpu_ns)
            limit = judged(used_ms, f"<= {MAX_IDLE_MS:g}") if server.name == OurServer.name else ""
            report.add(f"CPU time in {IDLE_S:.0f} s at rest, {server.name}", used_ms, "ms", limit=limit)


async def measure_start(pair: Pair, report: Report) -> None:
    """From the start of the process to the first token of a short prompt; the client asks at once, until answered."""
    starts: dict[str, list[float]] = {}
    imports = []
    for _ in range(pair.repeats):
        servers: list[Server] = [pair.llama, *([pair.make_ours()] if pair.with_ours else [])]
        for server in servers:
            try:
                starts.setdefault(server.name, []).append((await server.first_token()).ttft_s)
            finally:
                server.stop()
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - started)
    llama_s = median(starts[LlamaServer.name])
    report.add(f"start to first token, {LlamaServer.name}", llama_s, "s")
    report.add("import torch", median(imports), "s")
    if pair.with_ours:
        ours_s = median(starts[OurServer.name])
        add_compared(report, f"start to first token, {OurServer.name}", ours_s, "s", llama_s)
        beyond_s = ours_s - median(imports)
        report.add("the same beyond import torch", beyond_s, "s", limit=judged(beyond_s, "<= 2"))
