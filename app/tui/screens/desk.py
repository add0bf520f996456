"""What the parts of the main screen share: the session, the widgets, and calls to the service that may fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from textual.screen import Screen

from ..board import Board
from ..ports import RefusedError, ServiceLostError
from ..render.palette import Palette
from ..session import Session
from ..widgets.chat_list import ChatList
from ..widgets.composer import Composer
from ..widgets.transcript import Transcript

LOST_TEXT = "The service does not answer. Nothing you typed is lost; try again when it is back."

ERROR_STAYS_S = 3.0


class Desk(Screen[None]):
    def __init__(self, session: Session, palette: Palette, state_dir: Path | None):
        super().__init__()
        self.session = session
        self.palette = palette
        self.state_dir = state_dir
        self._error_until = 0.0

    @property
    def board(self) -> Board:
        return self.session.board

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def chat_list(self) -> ChatList:
        return self.query_one(ChatList)

    def say(self, text: str, *, tone: str = "information", title: str = "", timeout: float = 5) -> None:
        """A toast, in place of the one before unless that is a fresh error; the text is never read as markup."""
        now = time.monotonic()
        if now > self._error_until:
            self.app.clear_notifications()
        if tone == "error":
            self._error_until = now + ERROR_STAYS_S
        severity = {"warning": "warning", "error": "error"}.get(tone, "information")
        self.notify(text, title=title, severity=severity, timeout=timeout, markup=False)  # type: ignore[arg-type]

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call to the service in the background; a refusal becomes a toast, never a trace."""
        self.run_worker(self._guarded(work), group="calls", exit_on_error=False)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RefusedError as error:
            self.say(f"{error.message}\n{error.hint}".strip(), tone="error", timeout=10)
        except ServiceLostError:
            self.say(LOST_TEXT, tone="warning")

    def after_typing(self, action: Callable[[], None]) -> None:
        """Act when the composer has taken the keys pressed before: those of one burst act in order."""
        if self.composer.has_focus:
            self.composer.call_later(action)
        else:
            action()

    def keep_composed(self) -> None:
        """Remember what stands in the composer before something else comes in; ends an edit."""
        raise NotImplementedError

    def show_conversation(self, *, keep_position: bool = False) -> None:
        """Draw the open chat again from the session."""
        raise NotImplementedError

    def show_list(self) -> None:
        raise NotImplementedError

    def open(self, chat_id: str, message_id: str | None = None) -> None:
        """Show a chat, from its marked message on if one is named."""
        raise NotImplementedError
