"""The conversation as one line-API widget: thousands of messages cost what is in view.

`Stack` knows where each message stands. `_settle` is the only place where sizes change: it lays out what is in view,
corrects the scroll position and sets the virtual size. `render_line` only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from .copying import Span, source_text
from .item import TranscriptItem
from .selection import selected
from .stack import Stack

MAX_READING_CELLS = 100
MIN_READING_CELLS = 8
GUTTER_CELLS = 2


class Transcript(ScrollView, can_focus=True):
    HELP = "The conversation. Plain letters act on the marked message; Alt+Up and Alt+Down move the mark."
    BINDINGS = TRANSCRIPT_BINDINGS
    DEFAULT_CSS = """
    Transcript { overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; }
    """

    def __init__(self, palette: Palette, *, id: str | None = None):
        super().__init__(id=id)
        self.stack = Stack()
        self.is_following = True
        self.cursor: int | None = None
        """Index of the marked message."""
        self.num_unseen_lines = 0
        self._palette = palette
        self._width = 0
        self._is_settling = False

    @property
    def allow_select(self) -> bool:
        return True

    # Content

    @property
    def items(self) -> list[TranscriptItem]:
        return self.stack.items

    def show(self, items: Sequence[TranscriptItem], *, keep_position: bool = False) -> None:
        """Replace everything; the view goes to the end, or stays where it is."""
        self.stack.set_items(items)
        if not keep_position:
            self.is_following, self.cursor = True, None
        self.num_unseen_lines = 0
        if self.cursor is not None and self.cursor >= len(self.items):
            self.cursor = None
        self._settle()

    def append(self, item: TranscriptItem) -> None:
        self.stack.append(item)
        self.stack.lay_out(len(self.items) - 1)
        self._grown(item.height)

    def replace(self, index: int, message: Message, live: LiveReply | None) -> None:
        self.items[index].replace(message, live)
        self._grown(self.stack.lay_out(index))

    def extend(self, index: int, message: Message, text: str) -> None:
        self.items[index].extend(message, text)
        self._grown(self.stack.lay_out(index))

    def set_live(self, index: int, live: LiveReply | None) -> None:
        if self.items[index].set_live(live):
            self._grown(self.stack.lay_out(index))

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
        if self.items:
            index = len(self.items) if self.cursor is None else self.cursor
            self.mark(min(len(self.items) - 1, max(0, index + step)))

    def mark(self, index: int) -> None:
        self.cursor = index
        self.stack.ensure(index)
        self.stack.reindex()
        top, bottom = self.stack.starts[index : index + 2]
        if top < self.scroll_y or bottom > self.scroll_y + self.size.height:
            self.is_following = False
            # One that is taller than the view begins at the top; one from below comes in just so far.
            y = min(top, bottom - self.size.height) if top > self.scroll_y else top
            self.scroll_to(y=max(0, y), animate=False)
        self.post_message(MessagePicked())
        self._settle()

    def mark_message(self, message_id: str) -> bool:
        """False: it is not here."""
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
        stack = self.stack
        anchor = stack.item_at(int(self.scroll_y))
        share = (self.scroll_y - stack.starts[anchor]) / max(1, self.items[anchor].height) if self.items else 0.0
        self._width = self.scrollable_content_region.width
        stack.reset(max(MIN_READING_CELLS, min(MAX_READING_CELLS, self._width - GUTTER_CELLS - 1)), self._palette)
        if self.items and not self.is_following:
            stack.ensure(anchor)
            stack.reindex()
            self._set_view(stack.starts[anchor] + int(share * self.items[anchor].height))
        self._settle()

    def _settle(self) -> None:
        """Lay out what is in view, then fix the scroll position and the size."""
        if self._is_settling or not self._width:
            return
        self.stack.reindex()
        height = self.size.height
        if self.is_following:
            self.stack.lay_out_last(height)
            self._set_view(self.stack.num_lines - height)
        else:
            self._set_view(self.stack.lay_out_from(int(self.scroll_y), height))
        self.refresh()

    def _set_view(self, top: float) -> None:
        self._is_settling = True
        try:
            num_lines = self.stack.num_lines
            self.virtual_size = Size(self._width, num_lines)
            self.scroll_to(y=max(0, min(top, num_lines - self.size.height)), animate=False, force=True)
        finally:
            self._is_settling = False

    def _grown(self, num_lines: int) -> None:
        """An item changed its height: count what is new, unless the person looks at the end anyway."""
        if not self.is_following and num_lines > 0 and self.stack.num_lines >= self.scroll_y + self.size.height:
            self.num_unseen_lines += num_lines
        self._settle()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        absolute_y = y + self.scroll_offset.y
        strip = self._line_strip(absolute_y, base).crop_extend(0, width, base).apply_offsets(0, absolute_y)
        if self.num_unseen_lines and not self.is_following and y == self.size.height - 1:
            return self._with_pill(strip, width, base)
        return strip

    def _line_strip(self, y: int, base: Style) -> Strip:
        line = self.stack.line_at(y)
        if line is None:
            return Strip([])
        is_marked = self.has_focus and self.stack.item_at(y) == self.cursor
        gutter = f"{self._palette.glyphs.selected_bar} " if is_marked else " " * GUTTER_CELLS
        if line.strip is None:
            line.strip = Strip(line.segments)
        strip = Strip([Segment(gutter, self._palette.bullet), *line.strip], GUTTER_CELLS + line.strip.cell_length)
        strip = strip.apply_style(base)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        return self._highlighted(strip, span) if span is not None else strip

    def _highlighted(self, strip: Strip, span: Span) -> Strip:
        start, end = span[0], strip.cell_length if span[1] == -1 else span[1]
        return Strip.join([strip.crop(0, start), selected(strip.crop(start, end), self.screen), strip.crop(end)])

    def _with_pill(self, strip: Strip, width: int, base: Style) -> Strip:
        text = f" {self._palette.glyphs.down} {self.num_unseen_lines} new lines · End "
        pill = Strip([Segment(text, base + Style(reverse=True))])
        return Strip.join([strip.crop(0, max(0, width - pill.cell_length - 1)), pill, Strip([Segment(" ", base)])])

    # Mouse and focus

    def on_click(self, event: events.Click) -> None:
        if self.num_unseen_lines and event.y == self.size.height - 1:
            self.follow()
            return
        y = event.y + self.scroll_offset.y
        if self.items and y < self.stack.num_lines:
            self.cursor = self.stack.item_at(y)
            self.post_message(MessagePicked())
            self.refresh()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected source text, and the line break that ends it."""
        if selection.start is None and selection.end is None:
            return "\n\n".join(item.message.content for item in self.items), "\n"
        return source_text(self._selected(selection)), "\n"

    def _selected(self, selection: Selection) -> Iterator[tuple[Line, Span]]:
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self.stack.num_lines - 1
        for y in range(first, last + 1):
            line = self.stack.line_at(y)
            if line is not None:
                start, end = selection.get_span(y) or (0, -1)
                yield line, (start - GUTTER_CELLS, end if end == -1 else end - GUTTER_CELLS)
