"""`chatkv serve`, `stop`, `status`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chatkv.app.errors import UserError
from chatkv.app.hub.reports import human_bytes
from chatkv.app.paths import Paths

from .output import JsonOption, print_json, show
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client

Result = TypeVar("Result")
ANSWER_TIMEOUT_S = 10.0
"""A service that reads a long prompt or loads a model answers well within this."""
MODEL_LINES = ("error", "weights", "plan", "note")
"""Of a model's status: sentences for people."""


def serve(
    host: Annotated[str | None, typer.Option(help="A loopback address.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 picks a free one.", min=0, max=65535)] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Load this one.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="TCP without a key, for editors without a field.")] = False,
    any_model: Annotated[bool, typer.Option("--any-model", help="Answer unknown model names too.")] = False,
) -> None:
    """Run the service in the foreground until Ctrl-C."""
    from chatkv.app.service.server import checked_host

    if host is not None:
        checked_host(host)
    wanted = {"HOST": host, "NO_KEY": no_key or None, "ANY_MODEL": any_model or None}
    environment = {f"CHATKV_{name}": str(value) for name, value in wanted.items() if value is not None}
    command = [sys.executable, "-m", "chatkv.app.service"]
    command += ["--port", str(port)] if port is not None else []
    command += ["--model", model] if model is not None else []
    os.execve(sys.executable, command, {**os.environ, **environment})


def stop() -> None:
    """Stop the service. Running replies are kept as stopped and can be continued."""

    from chatkv.app.client import ServiceLostError

    async def ask(client: Client) -> str:
        try:
            await answer_in_time(client.paths, client.status())
            has_stopped = await client.stop()
        except ServiceLostError:
            return "No service runs."
        if not has_stopped:
            raise UserError("The service was told to stop but still runs.", "See chatkv status for its log and pid.")
        return "The service has stopped."

    print(with_client(ask, start=False))


def status(as_json: JsonOption = False) -> None:
    """Say what runs, where it listens and where everything lies."""
    found = with_client(_read_status, start=False)
    if as_json:
        print_json(found)
        return
    for name, value in _lines(found):
        print(show(f"{name:<12} {value}"))


def threads(
    number: Annotated[int, typer.Argument(help="Threads of the CPU kernels.", min=1, max=256)],
) -> None:
    """Compute with so many threads from now on, until the service stops. The setting `threads` is for good."""
    model = with_client(lambda client: client.set_threads(number), start=False)
    print(show(model["kernels"] or f"{number} threads, as soon as a model is loaded"))


async def _read_status(client: Client) -> dict[str, Any]:
    from chatkv.app.client import ServiceLostError

    try:
        return {"running": True, **await answer_in_time(client.paths, client.status())}
    except ServiceLostError:
        paths = Paths.from_env()
        return {
            "running": False,
            "socket": str(paths.socket_path),
            "key_file": str(paths.key_file),
            "settings_file": str(paths.settings_file),
            "log_file": str(paths.log_file),
            "home": {"data": str(paths.data_dir), "cache": str(paths.cache_dir), "models": str(paths.models_dir)},
        }


async def answer_in_time(paths: Paths, asked: Awaitable[Result]) -> Result:
    """
    Raises:
        UserError: a service has taken the connection but says nothing.
    """
    from chatkv.app.service.ownership import ServiceLock

    try:
        return await asyncio.wait_for(asked, ANSWER_TIMEOUT_S)
    except TimeoutError as error:
        pid = ServiceLock(paths.service_lock).owner().get("pid", "unknown")
        raise UserError(
            f"The chatkv service (pid {pid}) has not answered for {ANSWER_TIMEOUT_S:.0f} s.",
            f"If it hangs, end it with: kill -9 {pid}  (your chats are on disk). Its log: {paths.log_file}",
        ) from error


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("service", f"running, pid {found['pid']}" if found["running"] else "not running")]
    if found["running"]:
        model = found["model"]
        device = found["tiers"].get("device") or {}
        lines += [
            ("version", found["version"]),
            ("model", f"{model['name'] or 'none'} ({model['state'].replace('_', ' ')})"),
            ("device", f"{found['device']}, {model['kernels']}" if model.get("kernels") else found["device"]),
            *((name, model[name].replace("\n", " ")) for name in MODEL_LINES if model.get(name)),
            ("requests", f"{found['num_running']} running, {found['num_waiting']} waiting"),
        ]
        if device:
            size = human_bytes(device["num_blocks"] * device["block_bytes"])
            used = f"{device['num_used_blocks']:,} in use and {device['num_cached_blocks']:,} cached"
            lines.append(("KV blocks", f"{used} of {device['num_blocks']:,} ({size})"))
        if found["notice"]:
            lines.append(("notice", found["notice"]))
        lines.append(("URL", found["url"] or f"off: {found['tcp_error'] or 'by setting'}"))
    lines += [(name.removesuffix("_file"), str(found[name])) for name in ("socket", "key_file")]
    lines += [(name.removesuffix("_file"), str(found[name])) for name in ("settings_file", "log_file")]
    lines += [(kind, found["home"][kind]) for kind in ("models", "data", "cache")]
    return lines
