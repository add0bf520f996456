"""One message as lines: a head, the body, and for a reply its state and the proof of what was reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment

from .line import BLANK, Line, lines_from_rows
from .palette import Palette
from .stream import MarkdownStream
from .width import Run, cell_len, shorten, to_segments, wrap_text


@dataclass(frozen=True)
class MessageHead:
    """The first line: who, what model, and at the right the branch and the time."""

    is_reply: bool
    model: str = ""
    right: str = ""
    branch: tuple[int, int] | None = None
    """(position, count) among siblings, from 1, when there are several."""
    is_context_start: bool = False
    """The turns before are not sent to the model; a line says so."""

    def lines(self, width: int, palette: Palette) -> list[Line]:
        head = self.line(width, palette)
        if not self.is_context_start:
            return [head]
        text = " earlier turns are not sent to the model "
        bar = palette.glyphs.rule * max(2, (width - len(text)) // 2)
        return [Line(to_segments([(shorten(f"{bar}{text}{bar}", width), palette.warn)])), BLANK, head]

    def line(self, width: int, palette: Palette) -> Line:
        glyphs = palette.glyphs
        right = self.right
        if self.branch:
            right = f"{glyphs.left} {self.branch[0]}/{self.branch[1]} {glyphs.right}  {right}"
        left: list[Run] = [("assistant", palette.assistant)] if self.is_reply else [("you", palette.you)]
        used = cell_len(left[0][0])
        if self.is_reply and self.model and width >= 50:
            model = shorten(f" {glyphs.separator} {self.model}", max(0, width - used - cell_len(right) - 2))
            left.append((model, palette.dim))
            used += cell_len(model)
        space = max(1, width - used - cell_len(right))
        return Line(to_segments([*left, (" " * space, palette.dim), (right, palette.dim)]))


class MessageLayout:
    """Lines of one message at one width. A reply can grow by `extend`; the foot can change at any time."""

    def __init__(self, head: MessageHead, text: str, width: int, palette: Palette, is_open: bool = False):
        self._head = head.lines(width, palette)
        self._width = width
        self._palette = palette
        self._is_open = is_open
        self._foot: list[Line] = []
        self._markdown: MarkdownStream | None = None
        self._plain: list[Line] = []
        if head.is_reply:
            self._markdown = MarkdownStream(width, palette)
            self._markdown.feed(text)
            if not is_open:
                self._markdown.finish()
        else:
            self._plain = plain_lines(text, width, palette)
        self._lines: list[Line] | None = None

    @property
    def lines(self) -> list[Line]:
        if self._lines is None:
            self._lines = self._collect()
        return self._lines

    def extend(self, text: str) -> None:
        assert self._markdown is not None, "only a reply grows"
        self._markdown.feed(text)
        self._lines = None

    def set_foot(self, foot: Sequence[tuple[str, str]]) -> None:
        """Lines below the body, each (text, tone); the tone is dim, warn or bad."""
        styles = {"dim": self._palette.dim, "warn": self._palette.warn, "bad": self._palette.bad}
        self._foot = []
        for text, tone in foot:
            self._foot += lines_from_rows(wrap_text(text, self._width, styles[tone]), [], [])
        self._lines = None

    def _collect(self) -> list[Line]:
        if self._markdown is None:
            body = self._plain
        elif self._is_open:
            body = self._markdown.lines + _with_cursor(self._markdown.tail(), self._palette)
        else:
            body = self._markdown.lines
        return [*self._head, *body, *self._foot, BLANK]


def plain_lines(text: str, width: int, palette: Palette) -> list[Line]:
    """What a person typed: shown as typed, only wrapped."""
    lines: list[Line] = []
    for line in text.rstrip("\n").split("\n"):
        lines += lines_from_rows(wrap_text(line.expandtabs(4), width, palette.text), [], [])
    return lines


def estimate_height(num_chars: int, num_newlines: int, width: int, is_reply: bool) -> int:
    """A guess in lines, for messages that were never in view; cheap on purpose."""
    return 2 + is_reply + num_newlines + 1 + num_chars // max(1, width)


def _with_cursor(lines: list[Line], palette: Palette) -> list[Line]:
    cursor = to_segments([(palette.glyphs.cursor, palette.bullet)])
    if not lines:
        return [Line(cursor)]
    last = lines[-1]
    segments = list(last.segments)
    if segments and segments[-1].text.isspace() and len(segments) > 1:  # The background of a code line, to its edge.
        text, style, _ = segments.pop()
        cursor.append(Segment(text[1:], style))
    return [*lines[:-1], Line([*segments, *cursor], last.joint, last.num_prefix_chars)]
