"""One row of the transcript, with what copying needs to know about its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.segment import Segment

from .width import Row, Run, to_segments


@dataclass(slots=True)
class Line:
    segments: list[Segment]
    joint: str = "\n"
    """What a copy puts between the line before and this one; not a newline where the row was only wrapped."""
    num_prefix_chars: int = 0
    """Leading characters that are decoration when a copy starts before this line (indent, bullet column, bar)."""
    strip: Any = None
    """The widget's own form of the segments, kept here so that it dies with the line."""

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


BLANK = Line([])


def lines_from_rows(rows: Sequence[Row], first: Sequence[Run], rest: Sequence[Run], joint: str = "\n") -> list[Line]:
    """Rows behind a prefix; `first` is the first row's, `rest` that of the wrapped ones."""
    num_rest_chars = sum(len(text) for text, _ in rest)
    lines = []
    for index, row in enumerate(rows):
        prefix = first if index == 0 else rest
        segments = to_segments([*prefix, *row.runs])
        lines.append(Line(segments, joint, 0) if index == 0 else Line(segments, row.joint, num_rest_chars))
    return lines
