"""Measuring and breaking text in terminal cells, never in characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, split_graphemes
from rich.segment import Segment
from rich.style import Style

Run = tuple[str, Style]
"""Text in one style, without a line break."""

_CHUNK = re.compile(r"[^\S\xa0]+|(?:\S|\xa0)+")
ELLIPSIS = "…"


class Row(NamedTuple):
    runs: list[Run]
    joint: str
    """What stood between the row before and this one in the source: "" or white space for a soft break."""


def fit(text: str, width: int, ellipsis: str = ELLIPSIS) -> str:
    """`text` in exactly `width` cells: cut with an ellipsis, or padded with spaces."""
    if width <= 0:
        return ""
    length = cell_len(text)
    if length <= width:
        return text + " " * (width - length)
    head, used = _head(text, width - cell_len(ellipsis))
    return head + ellipsis[: max(0, width)] + " " * (width - used - cell_len(ellipsis))


def shorten(text: str, width: int, ellipsis: str = ELLIPSIS) -> str:
    """`text` in at most `width` cells."""
    return text if cell_len(text) <= width else fit(text, width, ellipsis).rstrip()


def wrap_runs(runs: Iterable[Run], width: int) -> list[Row]:
    """Break one source line into rows of at most `width` cells (at least 2), at spaces and between wide characters.

    Joining the rows with their joints gives the source text back.
    """
    width = max(2, width)
    rows: list[Row] = [Row([], "")]
    used = 0
    space: list[Run] = []
    space_cells = 0
    for text, style, cells, is_space in _words(runs, width):
        if is_space:
            space.append((text, style))
            space_cells += cells
            continue
        if used + space_cells + cells > width and (used or space):
            blanks = "".join(part for part, _ in space)
            if not used:  # An indent with a word too long to stand behind it: the indent gets a row of its own.
                rows[-1].runs.extend(_clipped(space, width))
                blanks = blanks[width:]
            rows.append(Row([(text, style)], blanks))
            used = cells
        else:
            rows[-1].runs.extend(space)
            rows[-1].runs.append((text, style))
            used += space_cells + cells
        space, space_cells = [], 0
    if space and (not rows[-1].runs or used + space_cells <= width):
        rows[-1].runs.extend(_clipped(space, width - used))
    return rows


def wrap_text(text: str, width: int, style: Style) -> list[Row]:
    return wrap_runs([(text, style)], width)


def char_index(text: str, cells: int) -> int:
    """Index of the character that stands at a cell."""
    return len(_head(text, max(0, cells))[0])


def to_segments(runs: Iterable[Run]) -> list[Segment]:
    """Runs as Rich segments, neighbours of one style merged."""
    segments: list[Segment] = []
    for text, style in runs:
        if segments and segments[-1].style is style:
            segments[-1] = Segment(segments[-1].text + text, style)
        elif text:
            segments.append(Segment(text, style))
    return segments


def _words(runs: Iterable[Run], width: int) -> Iterator[tuple[str, Style, int, bool]]:
    """Pieces that may not be broken, with their cells, and the white space between them.

    A word that several runs share (`**bold**ly`) may break where the style changes: rare, and harmless.
    """
    for text, style in runs:
        for match in _CHUNK.finditer(text):
            chunk = match.group()
            if chunk[0].isspace() and chunk[0] != "\xa0":
                yield chunk, style, cell_len(chunk), True
            elif chunk.isascii() and len(chunk) <= width:
                yield chunk, style, len(chunk), False
            else:
                yield from ((piece, style, cells, False) for piece, cells in _pieces(chunk, width))


def _pieces(word: str, width: int) -> Iterator[tuple[str, int]]:
    """A word cut at wide characters (CJK breaks anywhere) and, where it is longer than a row, at graphemes."""
    start, cells = 0, 0
    for begin, end, size in split_graphemes(word)[0]:
        is_wide = size > 1 and ord(word[begin]) >= 0x2E80 and ord(word[begin]) < 0x1F000
        if cells and (is_wide or cells + size > width):
            yield word[start:begin], cells
            start, cells = begin, 0
        cells += size
        if is_wide:
            yield word[start:end], cells
            start, cells = end, 0
    if start < len(word):
        yield word[start:], cells


def _clipped(runs: list[Run], cells: int) -> Iterator[Run]:
    for text, style in runs:
        if cells <= 0:
            return
        yield text[:cells], style
        cells -= len(text)


def _head(text: str, cells: int) -> tuple[str, int]:
    """The longest start of `text` that fits `cells`, whole graphemes only, and its cells."""
    used = 0
    for begin, _, size in split_graphemes(text)[0]:
        if used + size > cells:
            return text[:begin], used
        used += size
    return text, used
