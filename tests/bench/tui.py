"""`python -m tests.bench.tui`: the terminal app in a real pseudo-terminal, against the real service at nice 5.

First paint with the service up; key press to screen with four chats streaming, one of them on the screen; opening a
chat of 2,000 messages; processor time; and that an escape sequence in an answer does not reach the terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path

from chatkv.app.chats.records import MessageStatus
from chatkv.app.chats.store import ChatStore
from chatkv.app.client import Client
from chatkv.app.paths import Paths
from tests.running_service import RunningService

from .report import Report, median, percentile
from .terminal import Terminal

NUM_MESSAGES = 2000
NUM_CHATS = 4
NUM_KEYS = 300
KEYS_PER_S = 8
PAYLOAD = "\x1b]52;c;RVZJTC1QQVlMT0FE\x07"
APP = (sys.executable, "-m", "chatkv.app")
CTRL_O, CTRL_Q, CTRL_U, HOME, DOWN, ENTER = b"\x0f", b"\x11", b"\x15", b"\x1b[H", b"\x1b[B", b"\r"
ANSWER = (
    "Some **bold** text, `code` and a list:\n\n- one\n- two\n\n```python\nfor item in items:\n    print(item)\n```\n"
)


def write_chats(database: Path) -> None:
    """A chat of many messages, and one with an escape sequence; pinned, so that the keyboard finds them."""
    with ChatStore(database) as store:
        for title, last, num_turns in (
            ("evil", f"before {PAYLOAD} EVIL-END", 1),
            ("big", "BIG-END", NUM_MESSAGES // 2),
        ):
            chat = store.create_chat(title)
            tip = None
            for turn in range(num_turns):
                user = store.add_user_turn(chat.id, tip, f"question {turn}: why is it so?")
                reply = store.begin_reply(chat.id, user.id, "bench")
                text = last if turn == num_turns - 1 else f"Answer {turn}.\n\n{ANSWER * 2}"
                store.append_reply(reply.id, text, [], "none")
                store.finish_reply(reply.id, MessageStatus.COMPLETE, None)
                tip = reply.id
            store.update_chat(chat.id, is_pinned=True)


class Talkers:
    """Keeps a number of chats streaming: one that ends gets the next turn at once."""

    def __init__(self, service: RunningService, num_chats: int):
        self._service = service
        self._num_chats = num_chats
        self.num_turns = 0

    async def run(self) -> None:
        async with self._service.client() as client:
            ids = []
            for number in range(self._num_chats):
                body = {"title": f"talker {number}", "sampling": {"temperature": 1.0, "max_tokens": 1500}}
                ids.append((await client.post("/chatkv/chats", json=body)).json()["chat"]["id"])
            while True:
                for chat_id in ids:
                    self.num_turns += 1
                    text = f"Tell me a very long story, number {self.num_turns}, with many chapters and a list in each."
                    await client.post(f"/chatkv/chats/{chat_id}/turns", json={"text": text})  # 409 while it streams
                await asyncio.sleep(0.2)


def first_paint_s(service: RunningService) -> float:
    terminal = Terminal(APP, service.environment)
    painted = terminal.wait_for(b"newline", 0) - terminal.started_at
    terminal.wait_for(b"smollm2", 0)
    time.sleep(0.3)  # not measured: a quit in the middle of the start would measure the start
    terminal.close(CTRL_Q)
    return painted


def open_chat_s(terminal: Terminal, keys: bytes, marker: bytes) -> float:
    terminal.press(CTRL_O)
    time.sleep(0.4)
    terminal.press(keys)
    time.sleep(0.4)
    since = len(terminal.output)
    pressed = terminal.press(ENTER)
    return terminal.wait_for(marker, since) - pressed


def key_latencies_s(terminal: Terminal, num_keys: int, seed: int = 5) -> list[float]:
    """Type words; a key counts as shown when the row that is drawn after it ends with what was typed."""
    rng = random.Random(seed)
    latencies, row = [], ""
    for _ in range(num_keys):
        if len(row) > 40:
            terminal.press(CTRL_U)
            time.sleep(0.3)
            row = ""
        row += rng.choice(string.ascii_lowercase)
        since = len(terminal.output)
        pressed = terminal.press(row[-1].encode())
        latencies.append(terminal.wait_for(row[-6:].encode(), since, 5.0) - pressed)
        time.sleep(max(0.0, rng.uniform(0.5, 1.5) / KEYS_PER_S - latencies[-1]))
    return latencies


async def measure(service: RunningService, report: Report, num_keys: int) -> None:
    paints = [await asyncio.to_thread(first_paint_s, service) for _ in range(5)]
    report.add("first paint, service up, median of 5", median(paints), "s", limit="< 1")
    report.add("first paint, service up, slowest of 5", max(paints), "s")

    terminal = Terminal(APP, service.environment)
    await asyncio.to_thread(terminal.wait_for, b"smollm2", 0)
    await asyncio.sleep(2.0)
    opens = []
    for _ in range(3):
        opens.append(await asyncio.to_thread(open_chat_s, terminal, HOME, b"BIG-END"))
        await asyncio.to_thread(open_chat_s, terminal, HOME + DOWN, b"EVIL-END")
    report.add(f"open a chat of {NUM_MESSAGES} messages, median of 3", median(opens), "s", limit="< 0.5")
    is_shown = "␛]52;c;".encode() in terminal.output
    is_obeyed = b"\x1b]52" in terminal.output or b"\x1b]0;" in terminal.output
    report.add("ESC ] of an answer shown as text", float(is_shown), "1 = yes", limit="1")
    report.add("ESC ] of an answer sent to the terminal", float(is_obeyed), "1 = yes", limit="0")

    before, started = terminal.cpu_s(), time.perf_counter()
    await asyncio.sleep(5.0)
    report.add("processor, idle", 100 * (terminal.cpu_s() - before) / (time.perf_counter() - started), "% of a core")
    quiet = await asyncio.to_thread(key_latencies_s, terminal, 60)
    report.add("key to screen, nothing streams, 95 %", 1000 * percentile(quiet, 0.95), "ms")

    talkers = asyncio.create_task(Talkers(service, NUM_CHATS).run())
    while (await service.status())["num_running"] < NUM_CHATS:
        await asyncio.sleep(0.1)
    terminal.press(CTRL_U)
    await asyncio.to_thread(open_chat_s, terminal, HOME + DOWN * 2, b"assistant")
    before, waited, started = terminal.cpu_s(), terminal.waited_s(), time.perf_counter()
    running: list[int] = []
    typing = asyncio.create_task(asyncio.to_thread(key_latencies_s, terminal, num_keys))
    while not typing.done():
        running.append((await service.status())["num_running"])
        await asyncio.sleep(1.0)
    busy = await typing
    cpu = 100 * (terminal.cpu_s() - before) / (time.perf_counter() - started)
    report.add("chats streaming meanwhile, mean", statistics.mean(running), "chats")
    for share in (0.5, 0.95, 0.99):
        limit = "< 60" if share == 0.95 else ""
        figure = f"key to screen, {NUM_CHATS} chats stream, {100 * share:.0f} %"
        report.add(figure, 1000 * percentile(busy, share), "ms", against=1000 * percentile(quiet, share), limit=limit)
    report.add(f"processor, {NUM_CHATS} chats stream and a person types", cpu, "% of a core")
    waited = 100 * (terminal.waited_s() - waited) / (time.perf_counter() - started)
    report.add("time waited for a free core meanwhile", waited, "%")
    talkers.cancel()
    status = await asyncio.to_thread(terminal.close, CTRL_Q)
    report.add("exit status", float(status), "", limit="0")
    report.add("alternate screen left", float(b"\x1b[?1049l" in terminal.output[-4096:]), "1 = yes", limit="1")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="a CHATKV_HOME to keep, with its model; default: a temporary one")
    parser.add_argument("--keys", type=int, default=NUM_KEYS)
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        home: Path = options.home or Path(temporary)
        service = RunningService(home.absolute())
        service.install_model()
        os.environ["CHATKV_HOME"] = service.environment["CHATKV_HOME"]
        paths = Paths.from_env()
        paths.make_private()
        paths.chats_db.unlink(missing_ok=True)
        write_chats(paths.chats_db)
        async with Client(paths) as client:  # Started as any client starts it: detached, at nice 5.
            status = await client.ensure_service()
            service.socket_path = str(paths.socket_path)
            report.add("niceness of the service", os.getpriority(os.PRIO_PROCESS, status["pid"]), "", limit="5")
            try:
                while (await client.status())["model"]["state"] != "ready":
                    await asyncio.sleep(0.1)
                await measure(service, report, options.keys)
            finally:
                await client.stop()
    report.print_table()


if __name__ == "__main__":
    asyncio.run(main())
