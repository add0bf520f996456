"""A service of its own: own home, own process, own model. For benchmarks and end-to-end tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"


@dataclass
class Timing:
    """What a client sees of one streamed answer. Times are seconds since the request was sent."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.num_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


class RunningService:
    """Starts `python -m chatkv.app.service` and talks to it as any client would, over the unix socket."""

    def __init__(self, home: Path, **settings: str):
        self.home = home
        self.environment = {**os.environ, "CHATKV_HOME": str(home), "CHATKV_PORT": "0", **settings}
        self.socket_path = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0
        self.listening_s = 0.0

    def install_model(self, spec: str = MODEL) -> None:
        if not (self.home / "data" / "models" / MODEL / "chatkv.json").exists():
            command = [sys.executable, "-m", "chatkv.app", "pull", spec]
            subprocess.run(command, env=self.environment, check=True)
            subprocess.run([sys.executable, "-m", "chatkv.app", "stop"], env=self.environment, check=False)

    async def start(self) -> None:
        """Returns once the model answers; `listening_s` and `ready_s` say how long that took."""
        started = time.perf_counter()
        command = [sys.executable, "-m", "chatkv.app.service"]
        self.process = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL)
        self.socket_path = str(self._socket())
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the service ended with code {self.process.returncode}; see {self.home}")
            try:
                async with self.client() as client:
                    answer = await client.get("/health")
                self.listening_s = self.listening_s or time.perf_counter() - started
                if answer.json().get("status") == "ok":
                    break
                if answer.json().get("error", {}).get("code") == "model_load_failed":
                    raise RuntimeError(f"the model could not be loaded: {answer.text}; see {self.home}")
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.01)
        self.ready_s = time.perf_counter() - started

    def _socket(self) -> Path:
        code = "from chatkv.app.paths import Paths; print(Paths.from_env().socket_path)"
        found = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True
        )
        return Path(found.stdout.strip())

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.socket_path)
        return httpx.AsyncClient(transport=transport, base_url="http://chatkv", timeout=600)

    async def chat(self, messages: list[dict[str, Any]], num_tokens: int, **fields: Any) -> Timing:
        """One streamed chat completion of exactly `num_tokens` tokens (end-of-turn ids are ignored)."""
        timing = Timing()
        body = {
            "model": "",
            "messages": messages,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        started = time.perf_counter()
        async with self.client() as client:
            async for event in _events(client, body):
                now = time.perf_counter() - started
                if event.get("usage"):
                    usage = event["usage"]
                    timing.num_prompt_tokens = usage["prompt_tokens"]
                    timing.num_tokens = usage["completion_tokens"]
                    timing.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        timing.ttft_s = timing.ttft_s or now
                        timing.arrivals_s.append(now)
                        timing.text += text
        timing.total_s = time.perf_counter() - started
        return timing

    async def status(self) -> dict[str, Any]:
        async with self.client() as client:
            return dict((await client.get("/chatkv/status")).json())

    def resident_bytes(self) -> int:
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0

    def kill(self) -> None:
        """As a loss of power, but for what the system itself still writes."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event
