"""Markdown tables. Widths freeze after a few rows, so that a long table is never laid out again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rich.style import Style

from .inline import inline
from .line import Line
from .palette import Palette
from .width import Row, Run, cell_len, to_segments, wrap_runs

NUM_SAMPLE_ROWS = 16
"""Body rows that decide the column widths."""
MAX_COLUMNS = 24
MIN_COLUMN_CELLS = 4

_DELIMITER = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")


def is_delimiter_row(line: str, header: str) -> bool:
    """Whether `line` (`|---|:-:|`) makes a table of the header above it."""
    if not ("|" in line or "|" in header) or not _DELIMITER.match(line):
        return False
    num_columns = len(split_row(line))
    return num_columns == len(split_row(header)) and num_columns <= MAX_COLUMNS


def split_row(line: str) -> list[str]:
    """Cells of a row; `\\|` and a bar in a code span do not part cells."""
    cells, current, in_code = [], "", False
    line = line.strip()
    index = 1 if line.startswith("|") else 0
    while index < len(line):
        character = line[index]
        if character == "\\" and line[index + 1 : index + 2] == "|":
            current += "|"
            index += 2
            continue
        if character == "`":
            in_code = not in_code
        if character == "|" and not (in_code and "`" in line[index:]):
            cells.append(current.strip())
            current = ""
        else:
            current += character
        index += 1
    if current.strip() or not line.endswith("|") or not cells:
        cells.append(current.strip())
    return cells


@dataclass
class Table:
    header: list[str]
    alignments: list[str]
    rows: list[list[str]] = field(default_factory=list)
    """Rows not yet written; after the widths are frozen, none."""
    widths: list[int] | None = None

    @classmethod
    def begin(cls, header: str, delimiter: str) -> Table:
        return cls(split_row(header), [_alignment(cell) for cell in split_row(delimiter)])

    def copy(self) -> Table:
        return Table(self.header, self.alignments, list(self.rows), self.widths)

    def add(self, line: str, width: int, palette: Palette) -> list[Line]:
        """Take one row; returns the lines that are final now."""
        cells = split_row(line)[: len(self.header)]
        self.rows.append(cells + [""] * (len(self.header) - len(cells)))
        if self.widths is not None or len(self.rows) >= NUM_SAMPLE_ROWS:
            return self.flush(width, palette)
        return []

    def flush(self, width: int, palette: Palette) -> list[Line]:
        """Lines of all rows held back, behind the header if it was not written yet."""
        lines: list[Line] = []
        if self.widths is None:
            self.widths = _column_widths([self.header, *self.rows], width, palette)
            lines += self._row(self.header, palette.strong, palette)
            rule = f"{palette.glyphs.rule}{palette.glyphs.cross}{palette.glyphs.rule}".join(
                palette.glyphs.rule * cells for cells in self.widths
            )
            lines.append(Line(to_segments([(rule, palette.dim)])))
        for row in self.rows:
            lines += self._row(row, palette.text, palette)
        self.rows = []
        return lines

    def _row(self, cells: list[str], style: Style, palette: Palette) -> list[Line]:
        assert self.widths is not None
        columns = [
            wrap_runs(inline(cell, style, palette)[0], width) for cell, width in zip(cells, self.widths, strict=True)
        ]
        lines = []
        for index in range(max(len(column) for column in columns)):
            runs: list[Run] = []
            for number, (column, width) in enumerate(zip(columns, self.widths, strict=True)):
                if number:
                    runs.append((f" {palette.glyphs.cell_bar} ", palette.dim))
                row = column[index] if index < len(column) else Row([], "")
                runs += _aligned(row.runs, width, self.alignments[number])
            lines.append(Line(to_segments(runs)))
        return lines


def _alignment(cell: str) -> str:
    if cell.endswith(":"):
        return "center" if cell.startswith(":") else "right"
    return "left"


def _aligned(runs: list[Run], width: int, alignment: str) -> list[Run]:
    space = width - sum(cell_len(text) for text, _ in runs)
    before = {"left": 0, "right": space, "center": space // 2}[alignment]
    plain = Style.null()
    return [(" " * before, plain), *runs, (" " * (space - before), plain)]


def _column_widths(rows: list[list[str]], width: int, palette: Palette) -> list[int]:
    """Natural widths, the widest columns narrowed until the row fits `width` cells."""
    plain = Style.null()
    widths = [
        max(
            MIN_COLUMN_CELLS,
            *(sum(cell_len(text) for text, _ in inline(row[column], plain, palette)[0]) for row in rows),
        )
        for column in range(len(rows[0]))
    ]
    room = max(width - 3 * (len(widths) - 1), MIN_COLUMN_CELLS * len(widths))
    while sum(widths) > room:
        widest = max(widths)
        second = max((cells for cells in widths if cells < widest), default=MIN_COLUMN_CELLS)
        num_widest = widths.count(widest)
        cut = max(1, min(widest - second, -(-(sum(widths) - room) // num_widest)))
        for column, cells in enumerate(widths):
            if cells == widest and sum(widths) > room:
                widths[column] -= min(cut, sum(widths) - room)
    return widths
