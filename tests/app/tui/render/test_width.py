from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from chatkv.app.tui.render.width import char_index, fit, shorten, wrap_text

PLAIN = Style.null()
GRAPHEMES = ["a", "b", "-", " ", "  ", "日", "語", "👩\u200d👩\u200d👧", "e\u0301", "❤\ufe0f", "x"]
TEXT = st.lists(st.sampled_from(GRAPHEMES), max_size=60).map("".join)


def rows_of(text: str, width: int) -> list[str]:
    return ["".join(part for part, _ in row.runs) for row in wrap_text(text, width, PLAIN)]


@given(TEXT, st.integers(2, 30))
def test_no_row_is_wider_than_asked(text, width):
    assert all(cell_len(row) <= width for row in rows_of(text, width))


@given(TEXT, st.integers(2, 30))
def test_rows_and_joints_give_the_source_back(text, width):
    rows = wrap_text(text, width, PLAIN)
    joined = "".join(row.joint + "".join(part for part, _ in row.runs) for row in rows)
    assert joined.rstrip() == text.rstrip()


@given(TEXT, st.integers(0, 30))
def test_fit_gives_exactly_the_width(text, width):
    assert cell_len(fit(text, width)) == width
    assert cell_len(shorten(text, width)) <= max(width, cell_len("…"))


def test_words_stay_whole_and_cjk_breaks_anywhere():
    assert rows_of("the quick brown fox", 10) == ["the quick", "brown fox"]
    assert rows_of("日本語です", 4) == ["日本", "語で", "す"]
    assert rows_of("abcdefghij", 4) == ["abcd", "efgh", "ij"]


def test_an_index_is_found_by_cells_not_characters():
    assert char_index("日本語", 4) == 2
    assert char_index("abc", 99) == 3
