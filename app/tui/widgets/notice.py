"""What the person should know once: it stays above the composer until it is put away."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from textual import events
from textual.widgets import Static

from ..render.palette import Palette


class NoticeBar(Static):
    DEFAULT_CSS = """
    NoticeBar { display: none; height: auto; max-height: 4; padding: 0 1; background: $surface; }
    NoticeBar.-told { display: block; }
    """

    def __init__(self, *, id: str | None = None):
        super().__init__("", id=id, markup=False)
        self._waiting: list[str] = []
        self._told: set[str] = set()

    @property
    def text(self) -> str:
        """The notice that is shown; "" when there is none."""
        return self._waiting[0] if self._waiting else ""

    def tell(self, notices: Iterable[str], palette: Palette) -> None:
        """Show what was not told before, one after the other; what no longer holds goes."""
        notices = list(notices)
        fresh = [text for text in notices if text not in self._told]
        self._told.update(fresh)
        self._show([*(text for text in self._waiting if text in notices), *fresh], palette)

    def put_away(self, palette: Palette) -> None:
        self._show(self._waiting[1:], palette)

    def on_click(self, event: events.Click) -> None:
        self.screen.action_put_away()  # type: ignore[attr-defined]

    def _show(self, waiting: list[str], palette: Palette) -> None:
        if waiting == self._waiting:
            return
        self._waiting = waiting
        self.set_class(bool(waiting), "-told")
        more = f" (1 of {len(waiting)})" if len(waiting) > 1 else ""
        self.update(Text.assemble((f"{self.text}{more}", palette.warn), ("   Esc puts it away", palette.dim)))
