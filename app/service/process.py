"""The process from its start to its end: lock, sockets, loop, and everything given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import get_installed
from chatkv.app.paths import Paths
from chatkv.app.settings import Settings, load_settings

from .keys import read_or_make_api_key
from .last_model import LastModel
from .log_setup import detach, set_up_logging
from .ownership import ServiceLock, bind_tcp, bind_unix, unlink_socket

if TYPE_CHECKING:
    from .service import Endpoints, Service

log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005
"""An engine step makes hundreds of short calls; behind the HTTP thread each could wait 5 ms for the interpreter."""
LOCK_TIMEOUT_S = 30.0

MakeService = Callable[[Paths, Settings, "Endpoints"], "Service"]


class PortTakenError(UserError):
    """The port that was asked for by name cannot be had."""


def run(
    is_detached: bool = False,
    port: int | None = None,
    make_service: MakeService | None = None,
    model: str | None = None,
) -> int:
    """Serve this home until told to stop; 0 at once when another process serves it.

    Raises:
        UserError: settings, folders, socket, or an explicitly named port or model are refused.
    """
    os.umask(0o077)  # Whatever this process writes is nobody else's business.
    paths = Paths.from_env()
    paths.make_private()
    settings = load_settings(paths)
    lock = ServiceLock(paths.service_lock)
    if not lock.acquire_or_attach(paths.socket_path, LOCK_TIMEOUT_S):
        print(f"A chatkv service (pid {lock.owner().get('pid')}) serves {paths.socket_path} already.", file=sys.stderr)
        return 0
    try:
        set_up_logging(paths.log_file, is_foreground=not is_detached)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        stand_back(settings.nice)
        if model is not None:
            LastModel(paths.last_model_file).write(get_installed(paths, model).name)
        _serve(paths, settings, lock, is_detached, port, make_service or _real_service)
    except UserError as error:
        if is_detached:  # Else whoever started it reads it.
            log.error("%s", error)
        raise
    finally:
        lock.release()
    return 0


def stand_back(nice: int) -> None:
    """Leave the processor to others first.

    With autogroups, Linux weighs sessions, and the niceness of a process counts within its session only. A service that
    was started in the background leads one of its own, whose niceness is set too.
    """
    os.nice(nice)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # A kernel without autogroups.
            Path("/proc/self/autogroup").write_text(str(nice), "ascii")


def _serve(
    paths: Paths, settings: Settings, lock: ServiceLock, is_detached: bool, port: int | None, make_service: MakeService
) -> None:
    # Bound before the slow imports: a client that waits for the socket connects now and is answered in a moment.
    unix_socket = bind_unix(paths.socket_path, lock)
    try:
        tcp_socket, tcp_error = _bind_tcp(settings, port)
        if is_detached:  # Not before: whoever started us reads the refusals.
            detach(paths.log_file)
        from .server import run_service, tcp_policy
        from .service import Endpoints

        endpoints = Endpoints(str(paths.socket_path), tcp_error=tcp_error)
        policy = None
        if tcp_socket is not None:
            key = None if settings.no_key else read_or_make_api_key(paths.key_file)
            policy = tcp_policy(tcp_socket, key, frozenset(settings.allowed_origins))
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            endpoints = replace(endpoints, url=f"http://{host}:{policy.port}")
        asyncio.run(
            run_service(
                lambda ready: make_service(paths, settings, ready),
                endpoints,
                unix_socket,
                tcp_socket,
                policy,
                _stop_on_signals,
            )
        )
    finally:
        unlink_socket(paths.socket_path, lock)


def _bind_tcp(settings: Settings, port: int | None) -> tuple[socket.socket | None, str | None]:
    """The socket, or why there is none. Only a port that was named on the command line is worth failing for."""
    if not settings.tcp and port is None:
        return None, None
    from .server import checked_host

    try:
        return bind_tcp(checked_host(settings.host), settings.port if port is None else port), None
    except UserError as error:
        if port is not None:
            raise PortTakenError(error.message, error.hint) from error
        log.warning("TCP is off, the unix socket serves: %s", error)
        return None, str(error)


def _stop_on_signals(service: Service) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop_wanted.set)


def _real_service(paths: Paths, settings: Settings, endpoints: Endpoints) -> Service:
    from .installed_models import InstalledModels
    from .kv_store import KvStore
    from .model_loader import make_loader
    from .service import Service

    kv_store = KvStore(paths, settings)
    loader = make_loader(paths, settings, kv_store)
    return Service(paths, settings, InstalledModels(paths), loader, endpoints, kv_store)
