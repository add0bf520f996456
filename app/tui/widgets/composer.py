"""Where the person writes: Enter sends, several ways make a new line, earlier prompts come back with Up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.widgets import TextArea

from ..bindings import COMPOSER_BINDINGS
from ..commands import complete
from ..messages import EditorRequested, PromptChanged, QueuedWanted
from ..render.sanitize import sanitize

MAX_LINES = 10
NEWLINE_KEYS = frozenset({"ctrl+j", "shift+enter", "shift+\r", "alt+enter"})
"""`shift+\\r` is how Textual decodes xterm's modifyOtherKeys form of Shift+Enter."""


class Composer(TextArea):
    HELP = "Write here. Enter sends; Ctrl+J makes a new line; a line that starts with / is a command."
    BINDINGS = COMPOSER_BINDINGS
    DEFAULT_CSS = """
    Composer {
        height: 1; border: none; padding: 0; background: transparent;
        &:focus { border: none; }
        & .text-area--cursor-line { background: transparent; }
    }
    """

    def __init__(self, submit: Callable[[str], None], *, id: str | None = None):
        """`submit` gets the text, which may be empty, at Enter: a call and no message, so that the key after it finds
        the text gone."""
        super().__init__(id=id, soft_wrap=True, tab_behavior="focus", show_line_numbers=False, compact=True)
        self.highlight_cursor_line = False
        self.prompts: list[str] = []
        """Earlier prompts, oldest first; the open chat's and this sitting's, never a file."""
        self._submit = submit
        self._remembered: list[str] = []
        self.has_queued = False
        """Whether a turn of this chat still waits to be sent."""
        self._position: int | None = None
        self._unsent = ""

    def set_text(self, text: str) -> None:
        """Replace the text and put the cursor at its end."""
        self.load_text(sanitize(text))
        self.move_cursor(self.document.end)
        self._position = None

    def remember(self, prompt: str) -> None:
        """Up brings it back, in every chat of this sitting."""
        self._remembered = [*(earlier for earlier in self._remembered if earlier != prompt), prompt]
        self.show_prompts(self.prompts)
        self._position = None

    def show_prompts(self, prompts: Sequence[str]) -> None:
        """Another chat's prompts, behind them what was typed last."""
        self.prompts = [*(prompt for prompt in prompts if prompt not in self._remembered), *self._remembered]

    async def _on_key(self, event: events.Key) -> None:
        if self._handle_key(event.key):
            event.stop()
            event.prevent_default()
            return
        await super()._on_key(event)

    def _handle_key(self, key: str) -> bool:
        if key in NEWLINE_KEYS:
            self._insert("\n")
        elif key == "enter":
            self._enter()
        elif key == "tab" and (completed := complete(self.text)) is not None:
            self.set_text(completed)
        elif key == "up" and self.has_queued and not self.text:
            self.post_message(QueuedWanted())
        elif key == "up" and self.cursor_location[0] == 0 and self.wrapped_document_row == 0:
            return self._recall(-1)
        elif key == "down" and self._is_at_last_row:
            return self._recall(1)
        else:
            return False
        return True

    @property
    def wrapped_document_row(self) -> int:
        """Row of the cursor, soft wraps counted."""
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    @property
    def _is_at_last_row(self) -> bool:
        return self.wrapped_document_row == self.wrapped_document.height - 1

    def _enter(self) -> None:
        row, column = self.cursor_location
        if self.document.get_line(row)[:column].endswith("\\"):
            self.replace("\n", (row, column - 1), (row, column))
            return
        self._submit(self.text)

    def _recall(self, step: int) -> bool:
        position = len(self.prompts) if self._position is None else self._position
        target = position + step
        if not 0 <= target <= len(self.prompts) or target == position:
            return False
        if self._position is None:
            self._unsent = self.text
        is_back = target == len(self.prompts)
        self.set_text(self._unsent if is_back else self.prompts[target])
        self._position = None if is_back else target
        if step < 0:
            self.move_cursor((0, len(self.document.get_line(0))))
        return True

    def _insert(self, text: str) -> None:
        result = self.replace(text, *self.selection, maintain_selection_offset=False)
        self.move_cursor(result.end_location)

    async def _on_paste(self, event: events.Paste) -> None:
        """Many lines arrive as one text; control characters stay outside."""
        event.stop()
        event.prevent_default()
        self._insert(sanitize(event.text.replace("\r\n", "\n").replace("\r", "\n")))

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self._fit_height()
        self.post_message(PromptChanged())

    def on_resize(self) -> None:
        self._fit_height()

    def _fit_height(self) -> None:
        height = min(MAX_LINES, max(1, self.wrapped_document.height))
        if self.styles.height is None or self.styles.height.value != height:
            self.styles.height = height

    def action_open_editor(self) -> None:
        self.post_message(EditorRequested())
