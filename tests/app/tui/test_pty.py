"""In a real pseudo-terminal: it starts, draws, takes a resize, and leaves the terminal as it was, however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.bench.terminal import Terminal

PLAY = Path(__file__).with_name("play.py")
LEFT_ALTERNATE_SCREEN, SHOWN_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal((sys.executable, str(PLAY), str(tmp_path)), os.environ)
    terminal.wait_for(b"Porto", 0)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()


def test_ctrl_q_leaves_the_terminal_as_it_was(terminal):
    assert terminal.close(b"\x11") == 0
    assert LEFT_ALTERNATE_SCREEN in terminal.output
    assert SHOWN_CURSOR in terminal.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was_and_keeps_the_draft(terminal, tmp_path, number):
    since = len(terminal.output)
    terminal.press(b"typed")
    terminal.wait_for(b"typed", since)
    terminal.process.send_signal(number)
    assert terminal.process.wait(10) == 128 + number
    terminal.wait_for(LEFT_ALTERNATE_SCREEN, 0)
    kept = tmp_path / "unsaved-drafts.json"
    assert not kept.exists() or "typed" in json.loads(kept.read_text()).values(), "the service or the file has it"


def test_an_answer_cannot_reach_the_terminal_and_a_resize_is_drawn(terminal):
    since = len(terminal.output)
    terminal.press(b"\x0f\x1b[H\r")
    terminal.wait_for(b"river", since)
    assert b"\x1b]0;pwn" not in terminal.output
    since = len(terminal.output)
    terminal.resize((30, 8))
    terminal.wait_for(b"too small", since)
    since = len(terminal.output)
    terminal.resize((80, 24))
    terminal.wait_for(b"river", since)
    assert terminal.close(b"\x11") == 0


def test_pasted_terminal_output_is_one_text(terminal):
    since = len(terminal.output)
    terminal.press(b"\x1b[200~plain\r\x1b[31mred\x1b[0m\rlast\x1b[201~")
    terminal.wait_for("␛[31mred".encode(), since)
    terminal.wait_for(b"last", since)
    assert b"queued" not in terminal.output
    assert terminal.close(b"\x11") == 0
