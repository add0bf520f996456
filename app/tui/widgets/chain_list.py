"""The chains of the cache, one a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..bindings import CHAIN_LIST_BINDINGS
from ..render.chain_row import ChainRow
from ..render.palette import Palette
from ..render.width import Run
from .line_list import LineList


class ChainList(LineList[ChainRow]):
    HELP = "What is kept of each chat: █ on the device ▓ in RAM ░ on disk · not kept."
    BINDINGS = CHAIN_LIST_BINDINGS

    def __init__(self, open_chat: Callable[[str], object], palette: Palette, *, id: str | None = None):
        super().__init__(palette, id=id)
        self._open_chat = open_chat
        self._open_chat_id: str | None = None

    def show(self, rows: Sequence[ChainRow], open_chat_id: str | None) -> None:
        self._open_chat_id = open_chat_id
        self.show_rows(rows)
        if self.position is None:
            keys = [self.rows[index].key for index in self.choices]
            self.highlighted_key = open_chat_id if open_chat_id in keys else next(iter(keys), None)

    def row_runs(self, row: ChainRow, width: int) -> list[Run]:
        is_open = row.chat_id is not None and row.chat_id == self._open_chat_id
        return row.runs(width, self._palette, is_open=is_open)

    def choose(self, row: ChainRow) -> None:
        if row.chat_id is not None:
            self._open_chat(row.chat_id)
