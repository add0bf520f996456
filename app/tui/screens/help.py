"""Help: the keys of the pane in focus first, then those of the screen, then the commands."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from ..bindings import MAIN_BINDINGS
from ..commands import COMMANDS
from ..render.width import fit
from ..widgets.chat_list import ChatList
from ..widgets.composer import Composer
from ..widgets.transcript import Transcript
from .sheet import Sheet

NAMED_KEYS = {"pageup": "PageUp", "pagedown": "PageDown", "escape": "Esc"}
NAMES = {"Composer": "Composer", "Transcript": "Conversation", "ChatList": "Chats"}


class HelpScreen(Sheet[None]):
    sheet_title = "Help"
    sheet_keys = "arrows scroll · Esc closes"

    def __init__(self, focused: Widget | None):
        super().__init__()
        self._focused = focused

    def contents(self) -> Iterable[Widget]:
        with VerticalScroll() as scroll:
            scroll.can_focus = True
            yield Static(self._text(), id="body-text")

    def _text(self) -> Text:
        text = Text()
        keymap = self.app._keymap
        panes: list[type[Widget]] = [Composer, Transcript, ChatList]
        panes.sort(key=lambda pane: not isinstance(self._focused, pane))
        for pane in panes[:1]:
            _section(text, pane, keymap)
        text.append("\nEverywhere\n", "bold")
        _keys(text, MAIN_BINDINGS, keymap)
        _key(text, "Ctrl+P", "All commands")
        for pane in panes[1:]:
            text.append("\n")
            _section(text, pane, keymap)
        text.append("\nCommands\n", "bold")
        for command in COMMANDS:
            _key(text, f"/{command.name} {command.argument}".strip(), command.what)
        return text


def _section(text: Text, pane: type[Widget], keymap: object) -> None:
    from ..bindings import COMPOSER_KEYS

    text.append(f"{NAMES[pane.__name__]}\n", "bold")
    text.append(f"{pane.HELP}\n", "italic")
    if pane is Composer:
        for keys, what in COMPOSER_KEYS:
            _key(text, keys, what)
    everywhere = {binding.description for binding in MAIN_BINDINGS if isinstance(binding, Binding)}
    own = [b for b in pane.__dict__["BINDINGS"] if isinstance(b, Binding) and b.description not in everywhere]
    _keys(text, own, keymap)


def _keys(text: Text, bindings: Iterable[object], keymap: object) -> None:
    moved = keymap if isinstance(keymap, dict) else {}
    for binding in bindings:
        if isinstance(binding, Binding):
            _key(text, shown_keys(moved.get(binding.id, binding.key)), binding.description)


def _key(text: Text, keys: str, what: str) -> None:
    text.append(f"  {fit(keys, 18)}", "bold").append(f" {what}\n")


def shown_keys(keys: str) -> str:
    """`k,up` as `k, Up`; `ctrl+pageup` as `Ctrl+PageUp`."""
    return ", ".join(_shown_key(key) for key in keys.split(","))


def _shown_key(key: str) -> str:
    parts = [_shown_part(part) for part in key.split("+")]
    return "+".join([*parts[:-1], parts[-1].upper() if len(parts) > 1 and len(parts[-1]) == 1 else parts[-1]])


def _shown_part(part: str) -> str:
    return NAMED_KEYS.get(part, part if len(part) == 1 else part.capitalize())
