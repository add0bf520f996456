"""The list of chats, with what the cache holds of each."""

from __future__ import annotations

from collections.abc import Sequence

from ..bindings import CHAT_LIST_BINDINGS
from ..messages import ChatChosen
from ..render.chat_rows import ChatRow
from ..render.palette import Palette
from ..render.width import Run
from .line_list import LineList


class ChatList(LineList[ChatRow]):
    HELP = "Your chats. Enter opens one, / searches titles and messages."
    BINDINGS = CHAT_LIST_BINDINGS

    def __init__(self, palette: Palette, *, id: str | None = None):
        super().__init__(palette, id=id)
        self.open_chat_id: str | None = None

    def show(self, rows: Sequence[ChatRow], open_chat_id: str | None) -> None:
        if open_chat_id != self.open_chat_id:
            self.open_chat_id = open_chat_id
            self.refresh()
        self.show_rows(rows)

    @property
    def highlighted_chat_id(self) -> str | None:
        row = self.highlighted_row
        return row.chat_id if row is not None else None

    def highlight_open(self) -> None:
        """Put the bar on the open chat, else on the first."""
        self.highlight_chat(self.open_chat_id)
        if self.position is None:
            self.highlighted_key = None
            self.action_move(1)

    def highlight_chat(self, chat_id: str | None) -> None:
        """Put the bar on a chat, if it is in the list."""
        for index in self.choices:
            if self.rows[index].chat_id == chat_id:
                self.highlight(index)
                return

    def row_runs(self, row: ChatRow, width: int) -> list[Run]:
        runs = row.runs(width, self._palette)
        if row.key is not None and row.chat_id == self.open_chat_id and not row.message_id:
            text, style = runs[0]
            runs[0] = (self._palette.glyphs.selected_bar + text[1:], style)
            runs[1] = (runs[1][0], self._palette.strong)
        return runs

    def on_focus(self) -> None:
        if self.position is None:
            self.highlight_open()
        self.refresh()

    def choose(self, row: ChatRow) -> None:
        assert row.chat_id is not None
        self.post_message(ChatChosen(row.chat_id, row.message_id))
