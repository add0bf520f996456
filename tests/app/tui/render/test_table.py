from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from chatkv.app.tui.render.palette import Palette
from chatkv.app.tui.render.table import NUM_SAMPLE_ROWS, Table, is_delimiter_row, split_row

PALETTE = Palette()


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ("| a | b |", ["a", "b"]),
        ("a | b", ["a", "b"]),
        ("| a \\| b | c |", ["a | b", "c"]),
        ("| `a|b` | c |", ["`a|b`", "c"]),
        ("| `a | c |", ["`a", "c"]),
        ("| a |  |", ["a", ""]),
        ("|", [""]),
    ],
)
def test_cells_of_a_row(row, cells):
    assert split_row(row) == cells


@pytest.mark.parametrize(
    ("line", "header", "is_one"),
    [
        ("|---|:-:|", "| a | b |", True),
        ("--- | ---", "a | b", True),
        ("|---|", "| a | b |", False),
        ("---", "a", False),
        ("| a | b |", "| a | b |", False),
    ],
)
def test_what_makes_a_table(line, header, is_one):
    assert is_delimiter_row(line, header) is is_one


@given(st.lists(st.text("ab 日`*", max_size=60), min_size=1, max_size=5), st.integers(30, 90))
def test_rows_fit_the_width(cells, width):
    table = Table(["h"] * len(cells), ["left"] * len(cells), [cells])
    for line in table.flush(width, PALETTE):
        assert cell_len(line.text) <= max(width, 7 * len(cells))


def test_widths_freeze_so_that_later_rows_are_final_at_once():
    table = Table.begin("| a | b |", "|---|---|")
    lines = [line for _ in range(NUM_SAMPLE_ROWS) for line in table.add("| 1 | 2 |", 60, PALETTE)]
    assert len(lines) == NUM_SAMPLE_ROWS + 2
    late = table.add("| a much wider cell than before | 2 |", 60, PALETTE)
    assert len(late) > 1, "the wide cell wraps in its frozen column"
    assert not table.rows
