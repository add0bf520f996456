"""Esc, Ctrl+C and Ctrl+Q: what is closed, stopped or left, in which order."""

from __future__ import annotations

import time

from textual.widgets import Input

from ..widgets.chat_list import ChatList
from ..widgets.notice import NoticeBar
from .chat_actions import ChatActions

QUIT_AGAIN_S = 3.0
LATE_STOP_S = 0.5


class Leaving(ChatActions):
    reply_ended_at: float = 0.0
    """When a reply came to its end by itself."""
    _interrupted_at: float = 0.0

    def action_escape(self) -> None:
        if self.has_class("-list-open") or isinstance(self.focused, (ChatList, Input)):
            self.leave_list()
        elif self.editing is not None:
            self.after_typing(self._leave_edit)
        elif self.session.is_busy:
            self.do(self.session.stop())
        elif time.monotonic() - self.reply_ended_at < LATE_STOP_S:
            pass  # Meant to stop the reply that had just ended.
        elif self.query_one(NoticeBar).text:
            self.action_put_away()
        elif self.is_first_run and self.first_job is not None and self.first_job.state == "running":
            self.do(self.cancel_first_run())
        elif self.composer.has_focus:
            self.set_focus(self.transcript)
        else:
            self.transcript.clear_mark()
            self.set_focus(self.composer)

    def action_interrupt(self) -> None:
        selected = self.get_selected_text() or self.composer.selected_text
        if selected:
            self.copy(selected, "selection")
            self.clear_selection()
        elif self.session.is_busy:
            self.do(self.session.stop())
        elif time.monotonic() - self._interrupted_at < QUIT_AGAIN_S:
            self.action_quit()
        else:
            self._interrupted_at = time.monotonic()
            self.say("Ctrl+C again to quit.", timeout=QUIT_AGAIN_S)

    def _leave_edit(self) -> None:
        self.editing = None
        self.show_composed()
        self.show_bars()

    def action_quit(self) -> None:
        def act() -> None:
            self.keep_composed()
            self.app.exit(0)

        self.after_typing(act)

    def escape_does(self) -> str:
        """What Esc means in the composer now."""
        if self.editing is not None:
            return "leave the edit"
        if self.session.is_busy:
            return "stop"
        return "put away" if self.query_one(NoticeBar).text else "conversation"
