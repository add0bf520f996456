"""The conversation as one line-API widget: thousands of messages cost what is in view.

Items keep a height, guessed until they come into view; `starts` are the prefix sums. `_settle` is the only place where
sizes change: it lays out what is in view, corrects the scroll position and sets the virtual size. `render_line` only
reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from ..bindings import TRANSCRIPT_BINDINGS
from ..board import LiveReply
from ..messages import MessagePicked
from ..records import Message
from ..render.line import Line
from ..render.palette import Palette
from ..render.width import char_index
from .item import TranscriptItem

MAX_READING_CELLS = 100
GUTTER_CELLS = 2


class Transcript(ScrollView, can_focus=True):
    HELP = "The conversation. Plain letters act on the marked message; Alt+Up and Alt+Down move the mark."
    BINDINGS = TRANSCRIPT_BINDINGS
    DEFAULT_CSS = """
    Transcript { overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; }
    """

    def __init__(self, palette: Palette, *, id: str | None = None):
        super().__init__(id=id)
        self.items: list[TranscriptItem] = []
        self.is_following = True
        self.cursor: int | None = None
        """Index of the marked message."""
        self.num_unseen_lines = 0
        self._palette = palette
        self._starts: list[int] = [0]
        """First line of each item, and the total at the end."""
        self._width = 0
        self._is_settling = False

    @property
    def allow_select(self) -> bool:
        return True

    # Content

    def show(self, items: Sequence[TranscriptItem], *, keep_position: bool = False) -> None:
        """Replace everything; the view goes to the end, or stays where it is."""
        self.items = list(items)
        for item in self.items:
            item.estimate(self._body_width)
        if not keep_position:
            self.is_following, self.cursor = True, None
        self.num_unseen_lines = 0
        if self.cursor is not None and self.cursor >= len(self.items):
            self.cursor = None
        self._settle()

    def append(self, item: TranscriptItem) -> None:
        item.estimate(self._body_width)
        self.items.append(item)
        self._grown(len(self.items) - 1, item.lay_out(self._body_width, self._palette) + item.height)

    def replace(self, index: int, message: Message, live: LiveReply | None) -> None:
        item = self.items[index]
        item.replace(message, live)
        self._grown(index, item.lay_out(self._body_width, self._palette))

    def extend(self, index: int, message: Message, text: str) -> None:
        item = self.items[index]
        item.extend(message, text)
        self._grown(index, item.lay_out(self._body_width, self._palette))

    def set_live(self, index: int, live: LiveReply | None) -> None:
        item = self.items[index]
        if item.set_live(live):
            self._grown(index, item.lay_out(self._body_width, self._palette))

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self._lay_out_again()

    @property
    def marked(self) -> Message | None:
        """The marked message, else the last one."""
        if self.cursor is not None:
            return self.items[self.cursor].message
        return self.items[-1].message if self.items else None

    # Moving

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.is_following, self.num_unseen_lines = True, 0
        self._settle()

    def scroll_lines(self, num_lines: int) -> None:
        self.scroll_to(y=self.scroll_y + num_lines, animate=False)

    def scroll_pages(self, num_pages: int) -> None:
        self.scroll_lines(num_pages * max(1, self.size.height - 2))

    def move_cursor(self, step: int) -> None:
        """Mark the message before or after and bring it into view."""
        if not self.items:
            return
        index = len(self.items) if self.cursor is None else self.cursor
        self.mark(min(len(self.items) - 1, max(0, index + step)))

    def mark(self, index: int) -> None:
        self.cursor = index
        self._ensure(index)
        self._reindex()
        top, bottom = self._starts[index], self._starts[index + 1]
        if top < self.scroll_y or bottom > self.scroll_y + self.size.height:
            self.is_following = False
            self.scroll_to(y=max(0, min(top, bottom - self.size.height) if top > self.scroll_y else top), animate=False)
        self.post_message(MessagePicked(self.items[index].message.id))
        self._settle()

    def mark_message(self, message_id: str) -> bool:
        for index, item in enumerate(self.items):
            if item.message.id == message_id:
                self.mark(index)
                return True
        return False

    def clear_mark(self) -> None:
        self.cursor = None
        self.refresh()

    def action_scroll_line(self, step: int) -> None:
        self.scroll_lines(step)

    def action_scroll_page(self, step: int) -> None:
        self.scroll_pages(step)

    def action_home(self) -> None:
        self.is_following = False
        self.scroll_to(y=0, animate=False)

    def action_follow(self) -> None:
        self.follow()

    # Layout

    @property
    def _body_width(self) -> int:
        return max(8, min(MAX_READING_CELLS, (self._width or 80) - GUTTER_CELLS - 1))

    def on_resize(self, event: events.Resize) -> None:
        if self.scrollable_content_region.width != self._width:
            self._lay_out_again()
        else:
            self._settle()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._is_settling or round(old_value) == round(new_value):
            return
        self.is_following = new_value >= self.max_scroll_y
        if self.is_following:
            self.num_unseen_lines = 0
        self._settle()

    def _lay_out_again(self) -> None:
        """Width or colours changed: keep the message at the top where it is."""
        anchor = self._item_at(int(self.scroll_y))
        share = (self.scroll_y - self._starts[anchor]) / max(1, self.items[anchor].height) if self.items else 0.0
        self._width = self.scrollable_content_region.width
        for item in self.items:
            item.estimate(self._body_width)
        if self.items and not self.is_following:
            self._ensure(anchor)
            self._reindex()
            self._set_view(self._starts[anchor] + int(share * self.items[anchor].height))
        self._settle()

    def _settle(self) -> None:
        """Lay out what is in view until the heights hold, then fix the scroll position and the size."""
        if self._is_settling or not self._width:
            return
        self._reindex()
        top = self.scroll_y
        height = self.size.height
        if self.is_following:
            self._lay_out_from_the_end(height)
            top = self._starts[-1] - height
        else:
            top = self._lay_out_from(int(top), height)
        self._set_view(top)
        self.refresh()

    def _set_view(self, top: float) -> None:
        self._is_settling = True
        try:
            self.virtual_size = Size(self._width, self._starts[-1])
            self.scroll_to(y=max(0, min(top, self._starts[-1] - self.size.height)), animate=False, force=True)
        finally:
            self._is_settling = False

    def _lay_out_from_the_end(self, num_lines: int) -> None:
        for index in range(len(self.items) - 1, -1, -1):
            self._ensure(index)
            num_lines -= self.items[index].height
            if num_lines <= 0:
                break
        self._reindex()

    def _lay_out_from(self, top: int, num_lines: int) -> int:
        """Returns the corrected top: an item entered from below grows upwards, so that the eye is not moved."""
        first = self._item_at(top)
        if not self.items:
            return 0
        offset = top - self._starts[first]
        offset += self._ensure(first) if offset else 0
        offset = max(0, offset)
        room = num_lines + offset
        for index in range(first, len(self.items)):
            self._ensure(index)
            room -= self.items[index].height
            if room <= 0:
                break
        self._reindex()
        return self._starts[first] + offset

    def _ensure(self, index: int) -> int:
        item = self.items[index]
        return 0 if item.is_laid_out else item.lay_out(self._body_width, self._palette)

    def _reindex(self) -> None:
        self._starts = list(accumulate((item.height for item in self.items), initial=0))

    def _item_at(self, y: int) -> int:
        return min(max(0, bisect_right(self._starts, y) - 1), max(0, len(self.items) - 1))

    def _grown(self, index: int, num_lines: int) -> None:
        """An item changed its height: count what is new, unless the person looks at the end anyway."""
        if not self.is_following and num_lines > 0 and self._starts[-1] >= self.scroll_y + self.size.height:
            self.num_unseen_lines += num_lines
        self._settle()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        absolute_y = y + self.scroll_offset.y
        strip = self._line_strip(absolute_y, base)
        strip = strip.crop_extend(0, width, base).apply_offsets(0, absolute_y)
        if self.num_unseen_lines and not self.is_following and y == self.size.height - 1:
            return self._with_pill(strip, width, base)
        return strip

    def _line_strip(self, y: int, base: Style) -> Strip:
        index = self._item_at(y)
        if not self.items or y >= self._starts[-1]:
            return Strip([])
        lines = self.items[index].lines
        position = y - self._starts[index]
        if position >= len(lines):
            return Strip([])
        is_marked = index == self.cursor and self.has_focus
        gutter = f"{self._palette.glyphs.selected_bar} " if is_marked else " " * GUTTER_CELLS
        body = _strip_of(lines[position])
        strip = Strip([Segment(gutter, self._palette.bullet), *body], GUTTER_CELLS + body.cell_length).apply_style(base)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        return self._highlighted(strip, span) if span is not None else strip

    def _highlighted(self, strip: Strip, span: tuple[int, int]) -> Strip:
        style = self.screen.get_component_rich_style("screen--selection")
        start, end = span
        end = strip.cell_length if end == -1 else end
        before, selected, after = strip.crop(0, start), strip.crop(start, end), strip.crop(end)
        return Strip.join([before, Strip(Segment.apply_style(selected, post_style=style)), after])

    def _with_pill(self, strip: Strip, width: int, base: Style) -> Strip:
        text = f" {self._palette.glyphs.down} {self.num_unseen_lines} new lines · End "
        pill = Strip([Segment(text, base + Style(reverse=True))])
        return Strip.join([strip.crop(0, max(0, width - pill.cell_length - 1)), pill, Strip([Segment(" ", base)])])

    def on_click(self, event: events.Click) -> None:
        if self.num_unseen_lines and event.y == self.size.height - 1:
            self.follow()
            return
        y = event.y + self.scroll_offset.y
        if self.items and y < self._starts[-1]:
            self.cursor = self._item_at(y)
            self.post_message(MessagePicked(self.items[self.cursor].message.id))
            self.refresh()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    # Selecting with the mouse

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected source text: wrapped rows are joined, indents and bars left out."""
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self._starts[-1] - 1
        parts: list[str] = []
        for y in range(first, min(last + 1, self._starts[-1])):
            index = self._item_at(y)
            self._ensure(index)
            lines, position = self.items[index].lines, y - self._starts[index]
            if position >= len(lines):
                continue
            line, (start, end) = lines[position], selection.get_span(y) or (0, -1)
            begin = char_index(line.text, start - GUTTER_CELLS)
            stop = None if end == -1 else char_index(line.text, end - GUTTER_CELLS)
            if parts and line.joint != "\n":
                begin = max(begin, line.num_prefix_chars)
            parts.append((line.joint if parts else "") + line.text[begin:stop].rstrip())
        return "".join(parts), "\n"


def _strip_of(line: Line) -> Strip:
    if line.strip is None:
        line.strip = Strip(line.segments)
    return line.strip
