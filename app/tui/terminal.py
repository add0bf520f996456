"""The terminal behind the app: Textual's driver, with what it gets wrong for us put right."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.message import Message

PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
SHOWN_ESCAPE = "␛"


class PasteFilter:
    """Makes escapes inside a bracketed paste harmless; everything else passes as it is, cut anywhere."""

    def __init__(self) -> None:
        self._is_pasting = False
        self._tail = ""
        """Outside a paste: the last characters, which may be the beginning of its start. They were passed on."""
        self._held = ""
        """Inside: what may be the beginning of its end. It was not passed on."""

    def filter(self, data: str) -> str:
        passed = []
        while data:
            piece, data = self._take_paste(data) if self._is_pasting else self._take_keys(data)
            passed.append(piece)
        return "".join(passed)

    def _take_keys(self, data: str) -> tuple[str, str]:
        known = self._tail + data
        start = known.find(PASTE_START)
        if start < 0:
            self._tail = known[1 - len(PASTE_START) :]
            return data, ""
        self._is_pasting, self._tail = True, ""
        end = start + len(PASTE_START) - (len(known) - len(data))
        return data[:end], data[end:]

    def _take_paste(self, data: str) -> tuple[str, str]:
        data, self._held = self._held + data, ""
        text, end, rest = data.partition(PASTE_END)
        if end:
            self._is_pasting = False
        else:
            num_held = next((n for n in range(len(PASTE_END) - 1, 0, -1) if text.endswith(PASTE_END[:n])), 0)
            text, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return text.replace("\x1b", SHOWN_ESCAPE) + end, rest


class TerminalParser(XTermParser):
    """Textual reads an escape in a pasted text as the end of it, and the rest as keys: each line would be sent."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._pastes = PasteFilter()

    def feed(self, data: str) -> Iterable[Message]:
        filtered = self._pastes.filter(data)
        # Nothing is left of data that was all held back; an empty feed would mean the end of the input.
        return super().feed(filtered) if filtered or not data else ()


class TerminalDriver(linux_driver.LinuxDriver):
    """Draws on standard output when standard error goes elsewhere (`chatkv 2>log`), instead of into that file."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        if sys.__stdout__ is not None and (sys.__stderr__ is None or not sys.__stderr__.isatty()):
            self._file = sys.__stdout__

    def run_input_thread(self) -> None:
        # The driver names its parser as a global of its module; there is no other way in.
        linux_driver.XTermParser = TerminalParser  # type: ignore[misc]
        super().run_input_thread()
