"""Starting the terminal app."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import cached_property
from typing import Any, cast

from chatkv.app.paths import Paths
from chatkv.app.settings import Settings

from .ports import ChatService


def run(paths: Paths, settings: Settings, service: ChatService | None = None) -> int:
    """Show the app until the person quits; returns the exit status. The caller made sure that there is a terminal.

    Without a `service` it is this home's, started if none runs.
    """
    return asyncio.run(_run(paths, settings, service or cast(ChatService, _LateClient(paths))))


class _LateClient:
    """This home's client, made at first use: the first paint does not wait for the import of an HTTP library."""

    def __init__(self, paths: Paths):
        self._paths = paths

    @cached_property
    def _client(self) -> Any:
        from chatkv.app.client import Client

        return Client(self._paths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


async def _run(paths: Paths, settings: Settings, service: ChatService) -> int:
    if os.environ.get("SSH_CONNECTION"):
        os.environ.setdefault("TEXTUAL_FPS", "20")
        os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
    from .app import ChatApp
    from .terminal import TerminalDriver

    app = ChatApp(
        service,
        state_dir=paths.state_dir,
        default_model=settings.model,
        theme=settings.theme,
        is_ascii=settings.ascii_ui,
    )
    app.driver_class = TerminalDriver
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, app.leave, 128 + number)
    try:
        status = await app.run_async(mouse=settings.mouse)
    finally:
        await app.close()
    return status if status is not None else app.return_code or 0
