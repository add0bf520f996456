"""The source text of a stretch of rendered lines: wrapped rows joined, indents and bars left out."""

from __future__ import annotations

from collections.abc import Iterable

from ..render.line import Line
from ..render.width import char_index

Span = tuple[int, int]
"""Cells from and to; to is -1 for the rest of the row."""


def source_text(selected: Iterable[tuple[Line, Span]]) -> str:
    parts: list[str] = []
    for line, (start, end) in selected:
        begin = char_index(line.text, start)
        if parts and line.joint != "\n":
            begin = max(begin, line.num_prefix_chars)
        stop = None if end == -1 else char_index(line.text, end)
        parts.append((line.joint if parts else "") + line.text[begin:stop].rstrip())
    return "".join(parts)
