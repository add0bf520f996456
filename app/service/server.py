"""HTTP on the two sockets, in one event loop, and the life of the process from the lock to the last flush."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from chatkv.app.errors import UserError

from .access import Gate, TcpPolicy
from .application import create_app
from .errors import ApiError
from .responses import compact_json
from .service import Endpoints, Service

log = logging.getLogger(__name__)
KEEP_ALIVE_TIMEOUT_S = 75
GRACE_S = 2
MAX_HEADER_BYTES = 16 * 1024


class _JsonErrors(H11Protocol):
    """What is not HTTP at all is refused in the same shape as everything else."""

    def send_400_response(self, msg: str) -> None:
        body = compact_json(ApiError(400, msg, "invalid_http").body())
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        self.transport.close()


class _Listener(uvicorn.Server):
    """One socket. Signals are the process's business, not the listener's."""

    def __init__(self, app: Any):
        super().__init__(
            uvicorn.Config(
                app,
                http=_JsonErrors,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=GRACE_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )

        self._stop_wanted = asyncio.Event()
        self.servers = []

    def stop_accepting(self) -> None:
        """Connections that are there live on; a new client is refused at once."""
        for server in self.servers:
            server.close()

    def stop(self) -> None:
        self.should_exit = True
        self._stop_wanted.set()

    async def main_loop(self) -> None:
        """Sleeps; uvicorn's own wakes ten times a second."""
        await self.on_tick(0)
        await self._stop_wanted.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_service(
    make_service: Callable[[Endpoints], Service],
    endpoints: Endpoints,
    unix_socket: socket.socket,
    tcp_socket: socket.socket | None,
    policy: TcpPolicy | None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> None:
    """Serve until `stop_wanted` is set; then take no new client, end replies and close everything.

    A client that comes from then on starts the next service, which waits for this one's lock.
    """
    service = make_service(endpoints)
    app = create_app(service)
    listeners = [(_Listener(Gate(app, None)), unix_socket)]
    if tcp_socket is not None and policy is not None:
        listeners.append((_Listener(Gate(app, policy)), tcp_socket))
    serving = [asyncio.create_task(listener.serve(sockets=[bound])) for listener, bound in listeners]
    for task in serving:
        task.add_done_callback(lambda _: service.stop_wanted.set())
    service.start()
    log.info("service %d listens on %s and %s", os.getpid(), endpoints.socket, endpoints.url or "no TCP port")
    on_ready(service)
    await service.stop_wanted.wait()
    log.info("stopping")
    for listener, _ in listeners:
        listener.stop_accepting()
    await service.stop()
    for listener, _ in listeners:
        listener.stop()
    await asyncio.wait(serving)


def tcp_policy(bound: socket.socket, key: str | None, allowed_origins: frozenset[str]) -> TcpPolicy:
    host, port = bound.getsockname()[:2]
    return TcpPolicy(key, frozenset({host, "127.0.0.1", "::1"}), port, allowed_origins)


def checked_host(host: str) -> str:
    """
    Raises:
        UserError: it is not a loopback address.
    """
    if host in ("127.0.0.1", "::1", "localhost") or host.startswith("127."):
        return "127.0.0.1" if host == "localhost" else host
    raise UserError(
        f"The setting host = '{host}' is refused: chatkv serves this machine only.",
        "Use 127.0.0.1 (the default) or ::1.",
    )
