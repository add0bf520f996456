"""A list of rows as one line-API widget: a thousand rows and live badges cost what is in view."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..render.palette import Palette
from ..render.width import Run
from .selection import selected


class Row(Protocol):
    """One line. Rows are compared with `==`, to tell whether anything has to be drawn."""

    @property
    def key(self) -> Hashable | None:
        """What the row stands for; None for one that cannot be chosen."""

    @property
    def owner_key(self) -> Hashable | None:
        """Key of the row that a click on this one chooses."""

    def runs(self, width: int, palette: Palette) -> list[Run]: ...


RowT = TypeVar("RowT", bound=Row)


class LineList(ScrollView, Generic[RowT], can_focus=True):
    DEFAULT_CSS = """
    LineList { overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    """

    def __init__(self, palette: Palette, *, id: str | None = None):
        super().__init__(id=id)
        self.rows: list[RowT] = []
        self.highlighted_key: Hashable | None = None
        self._palette = palette

    def show_rows(self, rows: Sequence[RowT]) -> None:
        if rows == self.rows:
            return
        position = self.position
        self.rows = list(rows)
        self.virtual_size = Size(self.scrollable_content_region.width, len(rows))
        if position is not None and self.position is None:
            self._highlight_near(position)
        self.refresh()

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self.refresh()

    def choose(self, row: RowT) -> None:
        """Enter or a click on a row."""
        raise NotImplementedError

    def row_runs(self, row: RowT, width: int) -> list[Run]:
        """A subclass may dress the row."""
        return row.runs(width, self._palette)

    @property
    def highlighted_row(self) -> RowT | None:
        position = self.position
        return self.rows[position] if position is not None else None

    @property
    def position(self) -> int | None:
        """Index of the highlighted row, if it is there."""
        if self.highlighted_key is None:
            return None
        return next((index for index, row in enumerate(self.rows) if row.key == self.highlighted_key), None)

    def highlight(self, index: int) -> None:
        self.highlighted_key = self.rows[index].key
        top, height = self.scroll_offset.y, self.size.height
        if index < top or index >= top + height:
            self.scroll_to(y=max(0, index - height // 2), animate=False)
        self.refresh()

    def action_move(self, step: int) -> None:
        choices = self.choices
        if not choices:
            return
        current = self.position
        if current is None:
            position = 0 if step > 0 else len(choices) - 1
        else:
            position = min(len(choices) - 1, max(0, choices.index(current) + step))
        self.highlight(choices[position])

    def action_choose(self) -> None:
        row = self.highlighted_row
        if row is not None:
            self.choose(row)

    def on_click(self, event: events.Click) -> None:
        index = event.y + self.scroll_offset.y
        if index >= len(self.rows) or self.rows[index].owner_key is None:
            return
        self.highlighted_key = self.rows[index].owner_key
        self.action_choose()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        index = y + self.scroll_offset.y
        if index >= len(self.rows):
            return Strip.blank(width, base)
        row = self.rows[index]
        strip = Strip([Segment(text, style) for text, style in self.row_runs(row, width)]).apply_style(base)
        if self.has_focus and row.key is not None and row.key == self.highlighted_key:
            strip = selected(strip, self.screen)
        return strip.crop_extend(0, width, base)

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    @property
    def choices(self) -> list[int]:
        """Rows that can be chosen."""
        return [index for index, row in enumerate(self.rows) if row.key is not None]

    def _highlight_near(self, position: int) -> None:
        """The row that was there is gone: take the one that came to its place, else the last."""
        self.highlighted_key = None
        choices = self.choices
        if choices:
            self.highlight(next((index for index in choices if index >= position), choices[-1]))
