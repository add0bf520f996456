"""The messages of a transcript one below the other: their heights, guessed or measured, and where each begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from ..render.line import Line
from ..render.palette import Palette
from .item import TranscriptItem


class Stack:
    def __init__(self) -> None:
        self.items: list[TranscriptItem] = []
        self.starts: list[int] = [0]
        """First line of each item, and the total at the end; true after `reindex`."""
        self.width = 80
        self._palette = Palette()

    def set_items(self, items: Iterable[TranscriptItem]) -> None:
        self.items = list(items)
        self.reset(self.width, self._palette)

    def reset(self, width: int, palette: Palette) -> None:
        """Another width or other colours: forget all lines and guess the heights."""
        self.width, self._palette = width, palette
        for item in self.items:
            item.estimate(width)
        self.reindex()

    def append(self, item: TranscriptItem) -> None:
        item.estimate(self.width)
        self.items.append(item)

    def lay_out(self, index: int) -> int:
        """Make or measure the lines of an item; by how much its height changed."""
        return self.items[index].lay_out(self.width, self._palette)

    def ensure(self, index: int) -> int:
        """As `lay_out`, for an item that may have its lines already."""
        return 0 if self.items[index].is_laid_out else self.lay_out(index)

    def lay_out_last(self, num_lines: int) -> None:
        """Lay out as many items at the end as fill `num_lines`."""
        for index in range(len(self.items) - 1, -1, -1):
            self.ensure(index)
            num_lines -= self.items[index].height
            if num_lines <= 0:
                break
        self.reindex()

    def lay_out_from(self, top: int, num_lines: int) -> int:
        """Lay out what `num_lines` from line `top` on show.

        Returns the corrected top: an item entered from below grows upwards, so that the eye is not moved.
        """
        if not self.items:
            return 0
        first = self.item_at(top)
        offset = top - self.starts[first]
        if offset:
            offset = max(0, offset + self.ensure(first))
        room = num_lines + offset
        for index in range(first, len(self.items)):
            self.ensure(index)
            room -= self.items[index].height
            if room <= 0:
                break
        self.reindex()
        return self.starts[first] + offset

    def reindex(self) -> None:
        self.starts = list(accumulate((item.height for item in self.items), initial=0))

    @property
    def num_lines(self) -> int:
        return self.starts[-1]

    def item_at(self, y: int) -> int:
        """Index of the item that holds a line; 0 when there is none."""
        return min(max(0, bisect_right(self.starts, y) - 1), max(0, len(self.items) - 1))

    def line_at(self, y: int) -> Line | None:
        """None beyond the end, and where nothing was laid out yet."""
        if not self.items or not 0 <= y < self.num_lines:
            return None
        index = self.item_at(y)
        lines, position = self.items[index].lines, y - self.starts[index]
        return lines[position] if position < len(lines) else None
