"""Starting the terminal app."""

from __future__ import annotations

import asyncio
import os

from chatkv.app.paths import Paths
from chatkv.app.settings import Settings

from .ports import ChatService


def run(service: ChatService, paths: Paths, settings: Settings) -> int:
    """Show the app until the person quits; returns the exit status. The caller made sure that there is a terminal."""
    return asyncio.run(_run(service, paths, settings))


async def _run(service: ChatService, paths: Paths, settings: Settings) -> int:
    if os.environ.get("SSH_CONNECTION"):
        os.environ.setdefault("TEXTUAL_FPS", "20")
        os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
    from .app import ChatApp

    app = ChatApp(
        service,
        state_dir=paths.state_dir,
        default_model=settings.model,
        theme=settings.theme,
        is_ascii=settings.ascii_ui,
    )
    try:
        status = await app.run_async(mouse=settings.mouse)
    finally:
        await app.close()
    return status if status is not None else app.return_code or 0
