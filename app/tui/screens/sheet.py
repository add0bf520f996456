"""A sheet over the main screen: a frame with a title, left by Esc."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget

ResultT = TypeVar("ResultT")


class Sheet(ModalScreen[ResultT]):
    CSS_PATH = "sheet.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", show=False, id="sheet.leave"),
        # Priority: what is typed in one burst with it belongs to the next field.
        Binding("tab", "app.focus_next", "Next field", show=False, id="sheet.next", priority=True),
        Binding("shift+tab", "app.focus_previous", "Field before", show=False, id="sheet.previous", priority=True),
    ]
    sheet_title = ""
    sheet_keys = "Esc closes"

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet") as frame:
            frame.border_title = self.sheet_title
            frame.border_subtitle = self.sheet_keys
            yield from self.contents()

    def contents(self) -> Iterable[Widget]:
        raise NotImplementedError

    def action_leave(self) -> None:
        self.dismiss(None)
