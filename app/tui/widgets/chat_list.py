"""The list of chats as one line-API widget: a thousand chats and live badges cost what is in view."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..bindings import CHAT_LIST_BINDINGS
from ..messages import ChatChosen
from ..render.chat_rows import ChatRow
from ..render.palette import Palette
from .selection import selected


class ChatList(ScrollView, can_focus=True):
    HELP = "Your chats. Enter opens one, / searches titles and messages."
    BINDINGS = CHAT_LIST_BINDINGS
    DEFAULT_CSS = """
    ChatList { overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    """

    def __init__(self, palette: Palette, *, id: str | None = None):
        super().__init__(id=id)
        self.rows: list[ChatRow] = []
        self.open_chat_id: str | None = None
        self._highlighted: tuple[str, str | None] | None = None
        self._palette = palette

    def show(self, rows: Sequence[ChatRow], open_chat_id: str | None) -> None:
        if rows == self.rows and open_chat_id == self.open_chat_id:
            return
        position = self._position()
        self.rows, self.open_chat_id = list(rows), open_chat_id
        self.virtual_size = Size(self.scrollable_content_region.width, len(rows))
        if position is not None and self._position() is None:
            self._highlight_near(position)
        self.refresh()

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self.refresh()

    @property
    def highlighted_chat_id(self) -> str | None:
        return self._highlighted[0] if self._highlighted else None

    def action_move(self, step: int) -> None:
        choices = self._choices
        if not choices:
            return
        current = self._position()
        if current is None:
            position = 0 if step > 0 else len(choices) - 1
        else:
            position = min(len(choices) - 1, max(0, choices.index(current) + step))
        self._highlight(choices[position])

    def action_choose(self) -> None:
        index = self._position()
        if index is not None:
            self._choose(index)

    def highlight_open(self) -> None:
        """Put the bar on the open chat, else on the first."""
        self.highlight(self.open_chat_id)
        if self._position() is None:
            self._highlighted = None
            self.action_move(1)

    def highlight(self, chat_id: str | None) -> None:
        """Put the bar on a chat, if it is in the list."""
        for index in self._choices:
            if self.rows[index].chat_id == chat_id:
                self._highlight(index)
                return

    def on_click(self, event: events.Click) -> None:
        index = event.y + self.scroll_offset.y
        if index < len(self.rows) and self.rows[index].chat_id:
            self._highlighted = _key(self.rows[index])
            self._choose(index)

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        index = y + self.scroll_offset.y
        if index >= len(self.rows):
            return Strip.blank(width, base)
        row = self.rows[index]
        runs = row.runs(width, self._palette)
        if row.chat_id is not None and row.chat_id == self.open_chat_id and not row.message_id:
            text, style = runs[0]
            runs[0] = (self._palette.glyphs.selected_bar + text[1:], style)
            runs[1] = (runs[1][0], self._palette.strong)
        strip = Strip([Segment(text, style) for text, style in runs]).apply_style(base)
        if self.has_focus and row.chat_id is not None and _key(row) == self._highlighted:
            strip = selected(strip, self.screen)
        return strip.crop_extend(0, width, base)

    def on_focus(self) -> None:
        if self._position() is None:
            self.highlight_open()
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    @property
    def _choices(self) -> list[int]:
        """Rows that can be chosen."""
        return [index for index, row in enumerate(self.rows) if row.chat_id is not None]

    def _position(self) -> int | None:
        if self._highlighted is None:
            return None
        return next((index for index in self._choices if _key(self.rows[index]) == self._highlighted), None)

    def _highlight_near(self, position: int) -> None:
        """The row that was there is gone: take the one that came to its place, else the last."""
        self._highlighted = None
        choices = self._choices
        if choices:
            self._highlight(next((index for index in choices if index >= position), choices[-1]))

    def _highlight(self, index: int) -> None:
        self._highlighted = _key(self.rows[index])
        top, height = self.scroll_offset.y, self.size.height
        if index < top or index >= top + height:
            self.scroll_to(y=max(0, index - height // 2), animate=False)
        self.refresh()

    def _choose(self, index: int) -> None:
        row = self.rows[index]
        assert row.chat_id is not None
        self.post_message(ChatChosen(row.chat_id, row.message_id))
        self.refresh()


def _key(row: ChatRow) -> tuple[str, str | None]:
    assert row.chat_id is not None
    return row.chat_id, row.message_id
