from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from chatkv.app.tui.board import LiveReply
from chatkv.app.tui.records import ChatSummary, SearchHit
from chatkv.app.tui.render import format
from chatkv.app.tui.render.bar import bar
from chatkv.app.tui.render.chat_rows import chat_rows
from chatkv.app.tui.render.palette import Glyphs, Palette

PALETTE = Palette()
NOON = time.mktime((2026, 5, 20, 12, 0, 0, 0, 0, -1))


def labels(rows):
    return [row.label.strip() for row in rows if row.label]


def test_chats_are_grouped_by_pin_and_day():
    chats = [
        ChatSummary("1", "old", NOON - 5 * 86_400),
        ChatSummary("2", "pinned", NOON - 9 * 86_400, is_pinned=True),
        ChatSummary("3", "now", NOON - 60),
        ChatSummary("4", "yesterday", NOON - 20 * 3600),
    ]
    rows = chat_rows(chats, {}, NOON, PALETTE)
    assert labels(rows) == ["PINNED", "pinned", "TODAY", "now", "YESTERDAY", "yesterday", "OLDER (1)", "old"]
    assert next(row for row in rows if row.label == "now").right == "1m"


def test_live_chats_carry_their_phase():
    chats = [ChatSummary("1", "a", NOON), ChatSummary("2", "b", NOON), ChatSummary("3", "c", NOON)]
    live = {
        "1": LiveReply("1", phase="writing", tokens_per_s=31.2),
        "2": LiveReply("2", phase="reading", num_prompt_tokens=100, num_computed_tokens=43),
        "3": LiveReply("3", phase="waiting", queue_position=2),
    }
    rows = {row.chat_id: row for row in chat_rows(chats, live, NOON, PALETTE) if row.chat_id}
    assert [(rows[id].badge, rows[id].right) for id in "123"] == [
        ("●", "31 tok/s"),
        ("◐", "read 43 %"),
        ("◐", "wait #2"),
    ]


def test_a_search_filters_titles_and_lists_messages_below():
    chats = [ChatSummary("1", "Rust borrow", NOON), ChatSummary("2", "Porto", NOON)]
    hits = [
        SearchHit("2", "Porto", "m1", "…the rust…"),
        SearchHit("1", "", "m2", "x"),
        SearchHit("2", "Porto", "m3", "y"),
    ]
    rows = chat_rows(chats, {}, NOON, PALETTE, "rust", hits)
    assert labels(rows) == ["TODAY", "Rust borrow", "IN MESSAGES", "Porto", "…the rust…", "y", "New chat", "x"]
    assert [row.message_id for row in rows[-4:]] == ["m1", "m3", None, "m2"]
    assert labels(chat_rows(chats, {}, NOON, PALETTE, "nothing like it")) == ["nothing found"]


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        ([[44, 48]], "…is all over rust and more"),
        ([[2, 4]], "a long way before the word that is all over rust and more"),
        (None, "a long way before the word that is all over rust and more"),
        ([["x"]], "a long way before the word that is all over rust and more"),
    ],
)
def test_a_snippet_begins_shortly_before_the_match(marks, shown):
    snippet = "a long way before the word that is all over rust and more"
    assert SearchHit.from_json({"chat_id": "1", "message_id": "m", "snippet": snippet, "marks": marks}).snippet == shown


@given(st.text(max_size=60), st.integers(20, 60))
def test_rows_fill_the_list_exactly(title, width):
    for row in chat_rows([ChatSummary("1", title.strip(), NOON)], {}, NOON, PALETTE):
        assert sum(cell_len(text) for text, _ in row.runs(width, PALETTE)) == width


PARTS = st.lists(st.text("abc日", min_size=1, max_size=20).map(lambda text: [(text, PALETTE.text)]), max_size=4)


@given(PARTS, PARTS, st.integers(4, 60))
def test_a_bar_is_exactly_as_wide_as_the_screen(left, right, width):
    runs = bar(left, right, width)
    assert not runs or sum(cell_len(text) for text, _ in runs) == width


def test_a_narrow_bar_drops_its_last_parts_first():
    parts = [[("first", PALETTE.text)], [("second", PALETTE.text)]]
    text = "".join(part for part, _ in bar([[("left", PALETTE.text)]], parts, 14))
    assert text == "left     first"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (format.tokens(512), "512"),
        (format.tokens(5_940), "5.9k"),
        (format.tokens(1_250_000), "1.2M"),
        (format.size(101_000_000), "101 MB"),
        (format.size(4_400_000_000), "4.4 GB"),
        (format.size(12), "12 B"),
        (format.age(30), "now"),
        (format.age(7200), "2h"),
        (format.age(15 * 86_400), "2w"),
        (format.duration(0.19), "0.19 s"),
        (format.duration(4.21), "4.2 s"),
        (format.duration(100), "1:40"),
        (format.gauge(0.001, 4, Glyphs()), "▓░░░"),
        (format.gauge(0.5, 4, Glyphs()), "▓▓░░"),
        (format.gauge(2.0, 4, Glyphs()), "▓▓▓▓"),
    ],
)
def test_figures(made, expected):
    assert made == expected
