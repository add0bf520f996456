"""`python -m tests.bench.peer --llama-server PATH`: our service against llama-server with the same GGUF.

Two threads each, in turns, never both at work, medians of five, ratios within the run. `--only` picks sections, so that
a busy machine can be measured bit by bit; `--peer-only` leaves our service out. llama-server is whatever build PATH
names; nothing of chatkv needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.running_service import ROOT

from .kept_blocks import forget_store
from .peer_load import measure_idle, measure_load, measure_start
from .peer_memory import measure_memory, measure_resume
from .peer_servers import LlamaServer, Pair
from .peer_speed import measure_decode, measure_prefill, measure_reuse
from .report import Report

SECTIONS: dict[str, Callable[[Pair, Report], Awaitable[None]]] = {
    "decode": measure_decode,
    "reuse": measure_reuse,
    "start": measure_start,
    "load": measure_load,
    "idle": measure_idle,
    "prefill": measure_prefill,
    "resume": measure_resume,
    "memory": measure_memory,
}
"""The long ones last."""


def default_gguf() -> Path:
    """Where the tests keep the default model's file."""
    cache = Path(os.environ.get("CHATKV_TEST_CACHE", Path.home() / ".cache" / "chatkv-tests"))
    return cache / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return names


async def run(pair: Pair, names: list[str], report: Report) -> None:
    for name in names:
        forget_store(pair.home)
        await SECTIONS[name](pair, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, required=True, metavar="PATH", help="the peer's program")
    parser.add_argument("--llama-arguments", type=shlex.split, default=[], metavar="TEXT", help="more options for it")
    parser.add_argument("--gguf", type=Path, default=default_gguf(), help="default: the file that the tests keep")
    parser.add_argument("--only", type=sections, default=list(SECTIONS), metavar="A,B", help=", ".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-only", action="store_true", help="measure llama-server alone")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-peer", help="kept between runs")
    options = parser.parse_args()
    for file in (options.llama_server, options.gguf):
        if not file.exists():
            parser.error(f"{file} is not there")
    llama = LlamaServer(options.llama_server, options.gguf, options.llama_arguments)
    pair = Pair(llama, options.gguf, options.home.absolute(), options.repeats, not options.peer_only)
    print(json.dumps({"peer": llama.version(), "options": " ".join(llama.command[1:])}), flush=True)
    report = Report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # By way of what stops the servers.
    asyncio.run(run(pair, options.only, report))
    report.print_table()


if __name__ == "__main__":
    main()
