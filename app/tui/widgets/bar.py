"""A row of chrome that is drawn again only when its text changed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from ..render.bar import Part, bar


class Bar(Widget):
    DEFAULT_CSS = "Bar { height: 1; padding: 0 1; }"

    def __init__(self, *, id: str | None = None):
        super().__init__(id=id)
        self._left: Sequence[Part] = ()
        self._right: Sequence[Part] = ()

    def show(self, left: Sequence[Part], right: Sequence[Part] = ()) -> None:
        if (left, right) != (self._left, self._right):
            self._left, self._right = left, right
            self.refresh()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in bar(self._left, self._right, self.size.width)).strip()

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.rich_style
        runs = bar(self._left, self._right, width) if y == 0 else []
        strip = Strip([Segment(text, style) for text, style in runs]).apply_style(base)
        return strip.crop_extend(0, width, base)
