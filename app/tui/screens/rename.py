"""A new title for a chat."""

from __future__ import annotations

from collections.abc import Iterable

from textual import on
from textual.widget import Widget
from textual.widgets import Input

from .sheet import Sheet


class RenameScreen(Sheet[str]):
    sheet_title = "Rename the chat"
    sheet_keys = "Enter renames · Esc keeps the title"

    def __init__(self, title: str):
        super().__init__()
        self._title_before = title

    def contents(self) -> Iterable[Widget]:
        yield Input(self._title_before, placeholder="title", id="title")

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)
