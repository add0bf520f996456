"""When a chat is opened or a draft grows, the service is told, so that Enter finds the blocks on the device."""

from __future__ import annotations

from textual.timer import Timer

from ..commands import matching, parse
from ..records import Message
from ..warming import DRAFT_EVERY_S, OPEN_DELAY_S, Warmer
from .desk import Desk


class Warming(Desk):
    warmer: Warmer
    editing: Message | None = None
    """The message that the composer's text will replace, as a branch."""
    _opened_timer: Timer | None = None
    _draft_pace: Timer | None = None
    _was_ready = False

    def warm_when_ready(self) -> None:
        """The chat that was opened before its model was in memory: the usual case after a start."""
        is_ready = self.board.is_connected and self.board.status.model.state == "ready"
        if is_ready and not self._was_ready:
            self.warm_opened_soon()
        self._was_ready = is_ready

    def warm_opened_soon(self) -> None:
        """The chat that is open when the person has stopped going through the list."""
        if self._opened_timer is not None:
            self._opened_timer.stop()
        self._opened_timer = self.set_timer(OPEN_DELAY_S, self._warm_opened)

    def warm_draft_soon(self) -> None:
        """At most once a second, however fast somebody types."""
        if self._draft_pace is None and self.session.chat_id is not None:
            self._draft_pace = self.set_timer(DRAFT_EVERY_S, self._warm_draft)

    def _warm_opened(self) -> None:
        self._opened_timer = None
        if self.warmer.is_possible:
            self._tell(None)
            self.warm_draft_soon()

    def _warm_draft(self) -> None:
        self._draft_pace = None
        draft = self.composer.text
        if self.editing is not None or parse(draft) is not None or matching(draft):
            return
        if self.warmer.is_worth_telling(draft) and self.warmer.is_possible:
            self._tell(draft)

    def _tell(self, draft: str | None) -> None:
        self.run_worker(self.warmer.tell(draft), group="warm", exit_on_error=False)
