"""Markdown to lines while it arrives: what is certain is committed once, only the open block is laid out again.

The parser eats whole source lines, so the lines that a stream commits are those that one call with the full text
commits. Work per source line is bounded: a fence is lexed line by line, a table freezes its widths, a paragraph is cut
after `MAX_PARAGRAPH_CHARS`.

The dialect is what models write: CommonMark's blocks without setext headings, HTML and reference links; line breaks in
a paragraph are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.segment import Segment
from rich.style import Style

from . import blocks
from .blocks import Fence
from .highlight import LineHighlighter
from .inline import inline
from .line import BLANK, Line, lines_from_rows
from .nesting import Nesting
from .palette import Palette
from .table import Table, is_delimiter_row
from .width import cell_len, fit, to_segments, wrap_runs

MAX_PARAGRAPH_CHARS = 4096
MIN_BODY_CELLS = 12
"""Containers may not squeeze the text below this."""


class MarkdownStream:
    """Feed text in any pieces; `lines` are final, `tail()` is how the unfinished rest looks now."""

    def __init__(self, width: int, palette: Palette):
        self.lines: list[Line] = []
        self.code_blocks: list[Fence] = []
        self._width = max(MIN_BODY_CELLS, width)
        self._palette = palette
        self._partial = ""
        self._is_line_cut = False
        self._nesting = Nesting(palette)
        self._paragraph: list[str] = []
        self._num_paragraph_chars = 0
        self._fence: Fence | None = None
        self._highlighter: LineHighlighter | None = None
        self._table: Table | None = None
        self._is_gap_due = False
        self._has_content = False

    def feed(self, text: str) -> None:
        """Take the next piece of (sanitised) source."""
        self._partial += text
        start = 0
        while True:
            end = self._partial.find("\n", start)
            if (len(self._partial) if end < 0 else end) - start > MAX_PARAGRAPH_CHARS:
                cut = (
                    self._partial.rfind(" ", start + 1, start + MAX_PARAGRAPH_CHARS) + 1 or start + MAX_PARAGRAPH_CHARS
                )
                self._take_line(self._partial[start:cut], is_cut=True)
                start = cut
            elif end < 0:
                break
            else:
                self._take_line(self._partial[start:end], is_cut=False)
                start = end + 1
        self._partial = self._partial[start:]

    def finish(self) -> None:
        """The source is complete: commit the rest."""
        if self._partial:
            self._take_line(self._partial, is_cut=False)
            self._partial = ""
        self._close_block()
        self._close_containers(0)

    def tail(self) -> list[Line]:
        """Lines of the open block and the unfinished line. They may change with the next piece."""
        preview = MarkdownStream.__new__(MarkdownStream)
        preview.__dict__.update(self.__dict__)
        preview.lines = []
        preview.code_blocks = []
        preview._nesting = self._nesting.copy()
        preview._paragraph = list(self._paragraph)
        preview._fence = replace(self._fence, lines=[]) if self._fence else None
        preview._highlighter = self._highlighter.copy() if self._highlighter else None
        preview._table = self._table.copy() if self._table else None
        preview.finish()
        return preview.lines

    # Lines

    def _take_line(self, line: str, is_cut: bool) -> None:
        line = line.expandtabs(4)
        was_cut, self._is_line_cut = self._is_line_cut, is_cut
        if self._fence is not None:
            self._take_code(line, self._fence, was_cut)
        elif was_cut:
            self._flush_paragraph()
            self._add_text(line)
        else:
            self._take_block_line(line)

    def _take_code(self, line: str, fence: Fence, was_cut: bool) -> None:
        match = self._nesting.match(line)
        text = match.text
        if match.depth < len(self._nesting) and text.strip() and not was_cut:
            self._close_block()
            self._take_block_line(line)
        elif not was_cut and fence.is_closed_by(text):
            self._close_block()
        else:
            text = line if was_cut else text
            indent = len(text) - len(text.lstrip(" "))
            self._add_code(
                text if was_cut else text[min(indent, max(0, fence.indent - match.column)) :], fence, was_cut
            )

    def _take_block_line(self, line: str) -> None:
        match = self._nesting.match(line)
        stripped = match.text.lstrip(" ")
        if not stripped:
            self._close_block()
            self._close_containers(self._nesting.first_quote(match.depth))
            self._is_gap_due = self._has_content
            return
        column = match.column + len(match.text) - len(stripped)
        starts_block = self._starts_block(stripped)
        if match.depth < len(self._nesting) and (starts_block or not self._paragraph):
            self._close_block()
            self._close_containers(match.depth)
        elif starts_block:
            self._close_block()
        stripped, column = self._nesting.open(stripped, column)
        self._take_leaf(stripped, column)

    def _starts_block(self, text: str) -> bool:
        is_item = blocks.list_item(text, 0, 0, self._palette.glyphs) is not None
        return (
            text.startswith(">")
            or is_item
            or blocks.is_rule(text)
            or blocks.heading(text) is not None
            or blocks.fence(text, 0) is not None
        )

    # Blocks

    def _take_leaf(self, text: str, column: int) -> None:
        if self._table is not None:
            if "|" in text:
                self._emit(self._table.add(text, self._body_cells, self._palette))
                return
            self._close_block()
        found_heading = blocks.heading(text)
        opened = blocks.fence(text, column)
        if found_heading is not None:
            self._add_heading(*found_heading)
        elif opened is not None:
            self._begin_fence(opened)
        elif blocks.is_rule(text):
            self._is_gap_due = self._has_content
            self._emit([Line([Segment(self._palette.glyphs.rule * self._body_cells, self._palette.dim)])])
            self._is_gap_due = True
        elif self._paragraph and is_delimiter_row(text, self._paragraph[-1]):
            header = self._paragraph.pop()
            self._flush_paragraph()
            self._is_gap_due = self._has_content
            self._table = Table.begin(header, text)
        elif text:
            self._add_text(text)

    def _add_text(self, text: str) -> None:
        if self._num_paragraph_chars + len(text) > MAX_PARAGRAPH_CHARS:
            self._flush_paragraph()
        self._paragraph.append(text.rstrip(" ").removesuffix("\\"))
        self._num_paragraph_chars += len(text)

    def _add_heading(self, level: int, text: str) -> None:
        self._is_gap_due = self._has_content
        style = self._palette.top_heading if level == 1 else self._palette.heading
        self._emit(self._wrapped(text, style))

    def _begin_fence(self, opened: Fence) -> None:
        self._is_gap_due = self._has_content
        self._fence = opened
        self._highlighter = LineHighlighter(opened.language, self._palette)
        self.code_blocks.append(opened)
        title = fit(f" {opened.language or 'text'}", self._body_cells)
        self._emit([Line([Segment(title, self._palette.code_title)])])

    def _add_code(self, text: str, fence: Fence, was_cut: bool) -> None:
        assert self._highlighter is not None
        if was_cut and fence.lines:
            fence.lines[-1] += text
        else:
            fence.lines.append(text)
        space = self._palette.code_text
        rows = wrap_runs(self._highlighter.line(text), self._body_cells - 2)
        for row in rows:
            used = sum(cell_len(part) for part, _ in row.runs)
            row.runs.append((" " * (self._body_cells - 1 - used), space))
        lines = lines_from_rows(rows, [(" ", space)], [(" ", space)], joint="" if was_cut else "\n")
        for line in lines:
            line.num_prefix_chars = 1
        self._emit(lines)

    def _close_block(self) -> None:
        self._flush_paragraph()
        if self._table is not None:
            self._emit(self._table.flush(self._body_cells, self._palette))
            self._table = None
            self._is_gap_due = True
        if self._fence is not None:
            self._fence, self._highlighter = None, None
            self._is_gap_due = True

    def _flush_paragraph(self) -> None:
        if not self._paragraph:
            return
        text, self._paragraph, self._num_paragraph_chars = "\n".join(self._paragraph), [], 0
        style = self._palette.dim if self._nesting.is_quoted else self._palette.text
        self._emit(self._wrapped(text, style))

    def _close_containers(self, depth: int) -> None:
        """Close all but the first `depth`; an item that ends without text still shows its marker."""
        if depth < len(self._nesting) and self._nesting.is_marker_pending:
            self._emit([Line([])])
        self._nesting.close(depth)

    # Output

    @property
    def _body_cells(self) -> int:
        return max(MIN_BODY_CELLS, self._width - self._nesting.num_cells)

    def _wrapped(self, text: str, style: Style) -> list[Line]:
        lines: list[Line] = []
        for runs in inline(text, style, self._palette):
            lines += lines_from_rows(wrap_runs(runs, self._body_cells), [], [])
        return lines

    def _emit(self, lines: Sequence[Line]) -> None:
        """Commit lines behind the prefixes of the open containers."""
        if not lines:
            return
        if self._is_gap_due:
            self.lines.append(BLANK)
            self._is_gap_due = False
        self._has_content = True
        for line in lines:
            first = self._nesting.prefix()
            if first:
                prefix = to_segments(first)
                num_chars = sum(len(text) for text, _ in first)
                line = Line([*prefix, *line.segments], line.joint, num_chars + line.num_prefix_chars)
            self.lines.append(line)
