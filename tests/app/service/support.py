"""A running service with a scripted engine, on real sockets, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatkv.app.client import Client
from chatkv.app.paths import Paths
from chatkv.app.service.keys import read_or_make_api_key
from chatkv.app.service.ownership import ServiceLock, bind_tcp, bind_unix
from chatkv.app.service.server import run_service, tcp_policy
from chatkv.app.service.service import Endpoints, Service
from chatkv.app.settings import Settings

from .fake_engine import FakeEngine, FakeModels

Json = dict[str, Any]
TIMEOUT_S = 20.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A CHATKV_HOME with a path short enough for a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    monkeypatch.setenv("CHATKV_HOME", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Running:
    """What a test needs of a running service."""

    def __init__(self, service: Service, models: FakeModels, paths: Paths, port: int, key: str):
        self.service = service
        self.models = models
        self.paths = paths
        self.port = port
        self.key = key
        self.url = f"http://127.0.0.1:{port}"
        transport = httpx.AsyncHTTPTransport(uds=str(paths.socket_path))
        self.unix = httpx.AsyncClient(transport=transport, base_url="http://chatkv", timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {key}"}
        self.tcp = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=TIMEOUT_S)
        self.client = Client(paths)

    @property
    def engine(self) -> FakeEngine:
        return self.models.engines[-1]

    async def ready(self) -> Running:
        await until(lambda: self.service.models.loaded is not None)
        return self

    async def complete(self, content: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.unix.post("/v1/chat/completions", json=body)

    async def lines(self, content: str, **fields: Any) -> list[bytes]:
        """The raw events of a stream."""
        answer = await self.complete(content, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        return [block for block in answer.content.split(b"\n\n") if block]

    async def chunks(self, content: str, **fields: Any) -> list[Json]:
        *events, done = await self.lines(content, **fields)
        assert done == b"data: [DONE]"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    async def settled(self, chat_id: str) -> Json:
        """The chat once nothing is being written in it."""
        await until(lambda: self.service.replies.state(chat_id) == "idle")
        return await self.client.get_chat(chat_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_service(models: FakeModels, keep_alive_s: float = 10.0, **settings: Any) -> AsyncIterator[Running]:
    paths = Paths.from_env()
    paths.make_private()
    lock = ServiceLock(paths.service_lock)
    assert lock.try_acquire()
    unix_socket = bind_unix(paths.socket_path, lock)
    tcp_socket: socket.socket = bind_tcp("127.0.0.1", 0)
    key = read_or_make_api_key(paths.key_file)
    configured = Settings(**{"idle_exit_s": 0, **settings})
    policy = tcp_policy(tcp_socket, None if configured.no_key else key, frozenset(configured.allowed_origins))
    made: asyncio.Future[Service] = asyncio.get_running_loop().create_future()

    def make(endpoints: Endpoints) -> Service:
        return models.make_service(paths, configured, endpoints, keep_alive_s=keep_alive_s)

    task = asyncio.create_task(
        run_service(make, Endpoints(str(paths.socket_path)), unix_socket, tcp_socket, policy, made.set_result)
    )
    running = Running(await made, models, paths, policy.port, key)
    try:
        yield running
    finally:
        for gate in (models.load_gate, *(engine.step_gate for engine in models.engines)):
            gate.set()
        for client in (running.unix, running.tcp, running.client):
            await (client.close() if isinstance(client, Client) else client.aclose())
        running.service.stop_wanted.set()
        await task
        lock.release()


@pytest.fixture
async def running(home: Path) -> AsyncIterator[Running]:
    async with running_service(FakeModels()) as service:
        yield await service.ready()
