"""What a terminal sends, and what reaches the app."""

from __future__ import annotations

import random

import pytest
from textual import events

from chatkv.app.tui.terminal import PASTE_END, PASTE_START, TerminalParser


def parsed(data: str, cuts: list[int]) -> list[object]:
    """Keys as their names, pastes as events; `data` arrives in the pieces that `cuts` make of it."""
    parser = TerminalParser()
    tokens = []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if begin < end:
            tokens += parser.feed(data[begin:end])
    tokens += parser.tick()
    return [token.key if isinstance(token, events.Key) else token.text for token in tokens]


@pytest.mark.parametrize(
    "text", ["a\rb\rc", "\x1b[31mred\x1b[0m\rnext", "\x1b]0;t\x07\r", "\x1b\x1b[20", "\x1b[200~", "x\x1b"]
)
@pytest.mark.parametrize("seed", range(8))
def test_a_paste_stays_one_text_whatever_is_in_it_and_wherever_it_is_cut(text, seed):
    draw = random.Random(seed)
    data = f"k{PASTE_START}{text}{PASTE_END}\r"
    cuts = sorted(draw.sample(range(1, len(data)), min(seed * 3, len(data) - 1)))
    assert parsed(data, cuts) == ["k", text.replace("\x1b", "␛"), "enter"]


def test_keys_pass_as_they_are():
    assert parsed("a\x1b[A\x1b[5;3~\r", []) == ["a", "up", "alt+pageup", "enter"]


def test_two_pastes_in_one_read():
    assert parsed(f"{PASTE_START}a{PASTE_END}{PASTE_START}\x1bb{PASTE_END}", []) == ["a", "␛b"]
