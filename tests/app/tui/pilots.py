"""Driving the app in tests: wait for conditions, never for a time; look at the screen as text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fake_service import FakeService
from textual import events
from textual.keys import _character_to_key
from textual.message_pump import MessagePump
from textual.pilot import Pilot

from chatkv.app.tui.app import ChatApp
from chatkv.app.tui.screens.main import MainScreen

DEADLINE_S = 20.0
POLL_S = 0.005


def screen_text(app: ChatApp) -> str:
    """What is on the screen, one line a row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def wait_until(pilot: Pilot[int], condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}\n{screen_text(pilot.app)}"
        await asyncio.sleep(POLL_S)


async def wait_for(pilot: Pilot[int], *texts: str) -> None:
    """Until all texts are on the screen."""
    await wait_until(pilot, lambda: all(text in screen_text(pilot.app) for text in texts), str(texts))


async def wait_gone(pilot: Pilot[int], text: str) -> None:
    await wait_until(pilot, lambda: text not in screen_text(pilot.app), f"{text} gone")


def main_screen(pilot: Pilot[int]) -> MainScreen:
    screen = pilot.app.main_screen
    assert screen is not None
    return screen


async def open_chat(pilot: Pilot[int], chat_id: str) -> None:
    main_screen(pilot).open(chat_id)
    await wait_until(pilot, lambda: main_screen(pilot).session.chat_id == chat_id, "chat opened")
    await pilot.pause()


def burst(pilot: Pilot[int], *keys: str) -> None:
    """Keys that arrive in one read, before any of them was handled."""
    for key in keys:
        is_character = len(key) == 1
        pilot.app.post_message(
            events.Key(_character_to_key(key) if is_character else key, key if is_character else None)
        )


async def type_text(pilot: Pilot[int], text: str) -> None:
    burst(pilot, *text)
    await _all_taken(pilot.app)


async def press(pilot: Pilot[int], *keys: str) -> None:
    """Each key when the one before has been handled. `Pilot.press` would pause for a tenth of a second after each."""
    for key in keys:
        burst(pilot, key)
        await _all_taken(pilot.app)


async def _all_taken(app: ChatApp) -> None:
    """Until every widget on the way of a key, from the app to the focus and back, has emptied its queue."""
    await _empty(app)
    for widget in (app.focused or app.screen).ancestors_with_self:
        await _empty(widget)


async def _empty(pump: MessagePump) -> None:
    is_reached = asyncio.Event()
    if pump.call_later(is_reached.set):
        await asyncio.wait_for(is_reached.wait(), DEADLINE_S)


@asynccontextmanager
async def running(
    service: FakeService, size: tuple[int, int] = (120, 36), state_dir: Path | None = None, **options: object
) -> AsyncGenerator[Pilot[int], None]:
    app = ChatApp(service, state_dir=state_dir, default_model="smollm2-135m", **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        await wait_until(pilot, lambda: app.session.board.is_connected or service.is_lost, "connected")
        await wait_until(pilot, lambda: service.is_lost or service.called("list_chats"), "list fetched")
        await pilot.pause()
        yield pilot
