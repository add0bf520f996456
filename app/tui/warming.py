"""Telling the service which chat will be needed next, before it is asked. No Textual.

It is a courtesy: a refusal or silence is never shown, since the answer comes without it as well, only later.
"""

from __future__ import annotations

from .ports import RefusedError, ServiceLostError
from .session import Session

OPEN_DELAY_S = 0.3
"""A chat that is only passed on the way to another one is not warmed."""
DRAFT_EVERY_S = 1.0
MIN_GROWTH_CHARS = 48
"""About a block of new tokens: less changes nothing in the cache."""


class Warmer:
    def __init__(self, session: Session):
        self._session = session
        self._told: tuple[str | None, str] = (None, "")
        """Chat and draft that the service was told last."""
        self._is_telling = False

    @property
    def is_possible(self) -> bool:
        """Whether the open chat can be warmed now: while its reply is written, what follows is not known yet."""
        session = self._session
        is_ready = session.board.is_connected and session.board.status.model.state == "ready"
        return is_ready and session.chat_id is not None and not session.is_busy and not self._is_telling

    def is_worth_telling(self, draft: str) -> bool:
        """Whether the draft has grown by a good piece since it was told last."""
        chat_id, told = self._told
        known = told if chat_id == self._session.chat_id else ""
        return len(draft) - _num_common_chars(draft, known) >= MIN_GROWTH_CHARS

    async def tell(self, draft: str | None) -> None:
        """Have the open chat brought to the device; with a draft, have its blocks computed as well."""
        chat_id = self._session.chat_id
        if chat_id is None:
            return
        self._told = (chat_id, draft or "")
        self._is_telling = True
        try:
            await self._session.service.warm_chat(chat_id, draft)
        except (RefusedError, ServiceLostError):
            pass
        finally:
            self._is_telling = False


def _num_common_chars(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
