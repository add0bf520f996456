"""`python -m tests.bench.screenshot [FOLDER]`: the README's pictures, from a real session on the default model.

Several chats are written at once; the picture is taken while they are, so the figures in it are this machine's. Between
its two halves the service was started anew, so that the cache inspector shows chats that lie on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from chatkv.app.client import Client
from chatkv.app.paths import Paths
from chatkv.app.tui.app import ChatApp
from tests.running_service import MODEL, ROOT, RunningService

SIZE, NARROW_SIZE = (120, 36), (80, 24)
SYSTEM = "You are a helpful assistant. Answer in Markdown, briefly."
FIRST = "Write a Python function that adds the squares of a list of numbers, and explain it."
SECOND = "Show how to call it, in one short code block."
THIRD = "Now give three short tips about lists in Python."
OTHERS = ("Tell me a long story about a lighthouse.", "What should I pack for a week in Porto?")


async def wait_until(pilot: Pilot[int], condition: Callable[[], object], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await pilot.pause(0.05)


async def say(pilot: Pilot[int], text: str) -> None:
    assert pilot.app.main_screen is not None
    pilot.app.main_screen.fill(text)
    await pilot.press("enter")
    await wait_until(pilot, lambda: pilot.app.session.is_busy)


async def new_chat(pilot: Pilot[int], client: Client, title: str, text: str) -> str:
    sampling = {"temperature": 0.2, "max_tokens": 400, "seed": 7}
    chat = await client.create_chat(title=title, system=SYSTEM, sampling=sampling)
    await open_chat(pilot, chat["id"])
    await say(pilot, text)
    return str(chat["id"])


async def open_chat(pilot: Pilot[int], chat_id: str) -> None:
    assert pilot.app.main_screen is not None
    pilot.app.main_screen.open(chat_id)
    await wait_until(pilot, lambda: pilot.app.session.chat_id == chat_id)


async def talk() -> str:
    """Three chats with an answer each; the id of the one that the pictures show."""
    client = Client(Paths.from_env())
    app = ChatApp(Client(Paths.from_env()))
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: app.session.board.status.model.state == "ready")
        main = await new_chat(pilot, client, "Squares in Python", FIRST)
        await wait_until(pilot, lambda: not app.session.is_busy)
        for title, text in zip(("The lighthouse", "A week in Porto"), OTHERS, strict=True):
            await new_chat(pilot, client, title, text)
        await wait_until(pilot, lambda: not app.session.board.live)
        await client.update_chat(main, {"is_pinned": True})
        while (await client.cache())["tiers"]["disk"]["num_queued"]:
            await pilot.pause(0.1)
    await app.close()
    await client.close()
    return main


async def take(folder: Path, main: str, name: str, size: tuple[int, int]) -> None:
    """The chat while two replies are written, then the inspector."""
    app = ChatApp(Client(Paths.from_env()))
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: app.session.board.status.model.state == "ready")
        await open_chat(pilot, main)
        await say(pilot, SECOND)
        await wait_until(pilot, lambda: not app.session.is_busy)
        await say(pilot, THIRD)
        await wait_until(pilot, lambda: len(app.session.messages[-1].content) > 120)
        await wait_until(pilot, lambda: app.session.cache.report.chains or size[0] < 100)
        await pilot.pause(1.0)
        (folder / f"screenshot{name}.svg").write_text(app.export_screenshot(title="chatkv"), "utf-8")
        await pilot.press("f4")
        await wait_until(pilot, lambda: app.session.cache.report.chains)
        await pilot.pause(0.2)
        (folder / f"screenshot-cache{name}.svg").write_text(app.export_screenshot(title="chatkv"), "utf-8")
    await app.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "assets")
    parser.add_argument("--home", type=Path, help="a CHATKV_HOME to keep, with its model; default: a temporary one")
    parser.add_argument("--narrow", action="store_true", help="also as 80 columns and 24 lines show it")
    parser.add_argument("--model", default=MODEL, help="what `chatkv pull` takes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        service = RunningService((options.home or Path(temporary)).absolute())
        service.install_model(options.model)
        os.environ["CHATKV_HOME"] = service.environment["CHATKV_HOME"]
        try:
            await service.start()
            chat_id = await talk()
            sizes = {"": SIZE} | ({"-80x24": NARROW_SIZE} if options.narrow else {})
            for name, size in sizes.items():
                service.stop()
                await service.start()
                await take(options.folder, chat_id, name, size)
        finally:
            service.stop()


if __name__ == "__main__":
    asyncio.run(main())
