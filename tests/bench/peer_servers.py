"""The two servers of a pair, started and stopped in the same way, and what the system says of their processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.running_service import RunningService, Timing

from .peer_client import Address, Messages, RefusedError, get_json, stream_chat

NUM_THREADS = 2
NUM_CHATS = 8
CONTEXT_TOKENS = 8192
MODEL_NAME = "peer-bench"
RETRY_S = 0.005
SETTLE_S = 0.1
SETTLED_SHARE = 0.05
"""A process that takes less of a core than this has finished what it was asked."""
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 120.0


class Server:
    """A process that answers `/v1/chat/completions`."""

    name = ""
    process: subprocess.Popen[bytes] | None = None
    address: Address = 0

    def launch(self) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Returns when it has answered a first request, which warms it up."""
        await self.first_token()
        await self.chat([{"role": "user", "content": "Hello"}], 8)
        await self.settle()

    async def first_token(self) -> Timing:
        """Launch it and ask at once, again and again until it answers.

        Returns the timing of the answer; its `ttft_s` counts from the start of the process.
        """
        started = time.perf_counter()
        self.launch()
        while True:
            asked = time.perf_counter() - started
            try:
                timing = await self.chat([{"role": "user", "content": "Hello"}], 1)
            except (OSError, EOFError, RefusedError) as error:
                if self.process is None or self.process.poll() is not None or asked > START_TIMEOUT_S:
                    raise RuntimeError(f"{self.name} did not start: {error}") from error
                await asyncio.sleep(RETRY_S)
            else:
                timing.ttft_s += asked
                return timing

    async def chat(self, messages: Messages, num_tokens: int) -> Timing:
        return await stream_chat(self.address, messages, num_tokens)

    async def settle(self) -> None:
        """Wait until it computes and writes no more, so that the other server has the cores to itself."""
        deadline = time.perf_counter() + SETTLE_TIMEOUT_S
        while True:
            before = self.cpu_ns()
            await asyncio.sleep(SETTLE_S)
            if self.used_s(before) < SETTLED_SHARE * SETTLE_S:
                return
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{self.name} goes on computing with nothing to do")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def cpu_ns(self) -> dict[str, int]:
        """CPU time so far of each thread, by its id."""
        threads = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # A thread that has just ended.
                threads[task.name] = int((task / "schedstat").read_text().split()[0])
        return threads

    def used_s(self, before: dict[str, int]) -> float:
        """CPU time since `before` of the threads that there are."""
        return sum(now - before.get(thread, 0) for thread, now in self.cpu_ns().items()) / 1e9

    def memory_bytes(self) -> dict[str, int]:
        """`Rss` and `Pss`: the second counts pages shared with other processes by their share."""
        rows = (line.split() for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:])
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0] in ("Rss:", "Pss:")}

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class LlamaServer(Server):
    """llama-server with what suits it best on so many threads: one context for each of eight chats, prompts cached
    in their slots (its default) and in RAM (its default), flash attention and batch sizes as it chooses, no web page.
    """

    name = "llama-server"

    def __init__(self, binary: Path, gguf: Path, extra_arguments: Sequence[str] = ()):
        self.binary = binary.absolute()
        self.gguf = gguf
        self.extra_arguments = extra_arguments

    @property
    def command(self) -> list[str]:
        return [
            str(self.binary),
            *("--model", str(self.gguf)),
            *("--host", "127.0.0.1", "--port", str(self.address)),
            *("--threads", str(NUM_THREADS), "--threads-batch", str(NUM_THREADS)),
            *("--ctx-size", str(NUM_CHATS * CONTEXT_TOKENS), "--parallel", str(NUM_CHATS)),
            *("--flash-attn", "auto", "--jinja", "--no-webui", "--log-verbosity", "0"),
            *self.extra_arguments,
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of ours reaches its OpenMP."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        libraries = [str(self.binary.parent), *filter(None, [kept.get("LD_LIBRARY_PATH")])]
        return {**kept, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}

    def launch(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = int(free.getsockname()[1])
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def version(self) -> str:
        run = subprocess.run([self.binary, "--version"], env=self.environment, capture_output=True, text=True)
        said = (run.stdout + run.stderr).splitlines()
        return next((line for line in said if line.startswith("version")), "version unknown")


class OurServer(Server):
    """`python -m chatkv.app.service` with a home of its own, asked over its unix socket.

    It starts at the priority of the other server: by itself it stands back behind other programs.
    """

    name = "chatkv"

    def __init__(self, home: Path, gguf: Path, **settings: str):
        wanted = {"CHATKV_MODEL": MODEL_NAME, "CHATKV_THREADS": str(NUM_THREADS), "CHATKV_NICE": "0", **settings}
        self.service = RunningService(home, **wanted)
        self.home = home
        self._install(gguf)
        self.address = self.service._socket()

    def _install(self, gguf: Path) -> None:
        if not (self.home / "data" / "models" / MODEL_NAME / "chatkv.json").exists():
            command = [sys.executable, "-m", "chatkv.app"]
            environment = self.service.environment
            try:
                subprocess.run([*command, "pull", str(gguf), "--name", MODEL_NAME], env=environment, check=True)
            finally:
                subprocess.run([*command, "stop"], env=environment, check=False)

    def launch(self) -> None:
        command = [sys.executable, "-m", "chatkv.app.service"]
        self.process = subprocess.Popen(command, env=self.service.environment, stdout=subprocess.DEVNULL)

    async def status(self, path: str = "/chatkv/status") -> dict[str, Any]:
        return await get_json(self.address, path)


@dataclass
class Pair:
    """Makes servers of the same GGUF. Without `with_ours` only the peer is measured."""

    llama: LlamaServer
    gguf: Path
    home: Path
    repeats: int
    with_ours: bool = True

    def make_ours(self, **settings: str) -> OurServer:
        return OurServer(self.home, self.gguf, **settings)

    @contextlib.asynccontextmanager
    async def running(self, **settings: str) -> AsyncIterator[list[Server]]:
        """Both started and idle, the peer first; stopped afterwards."""
        servers: list[Server] = [self.llama, *([self.make_ours(**settings)] if self.with_ours else [])]
        try:
            for server in servers:
                await server.start()
            yield servers
        finally:
            for server in servers:
                server.stop()
