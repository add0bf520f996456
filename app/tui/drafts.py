"""What was typed and not sent. Saved with the chat a moment after the last key; in a file when no service answers."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from .ports import RefusedError, ServiceLostError

HTTP_NOT_FOUND = 404
"""The chat is gone for good; its draft goes with it."""
NEW_CHAT = ""
"""Key of the chat that the service does not know yet."""


class Drafts:
    """Unsaved drafts by chat id. `file` holds what could not be given to the service before the app ended."""

    def __init__(self, file: Path | None = None):
        self._file = file
        self._unsaved: dict[str, str] = {}

    def put(self, chat_id: str | None, text: str) -> None:
        self._unsaved[chat_id or NEW_CHAT] = text

    def pending(self, chat_id: str | None) -> str | None:
        """The text not yet saved, newer than the service's."""
        return self._unsaved.get(chat_id or NEW_CHAT)

    @property
    def is_saved(self) -> bool:
        return not self._unsaved

    async def flush(self, save: Callable[[str, str], Awaitable[None]]) -> bool:
        """Give every draft to `save(chat_id, text)`; False when the service did not take them all.

        `save` gets an empty chat id for the new chat; an empty draft of it is forgotten.
        """
        is_done = True
        for chat_id, text in list(self._unsaved.items()):
            try:
                if chat_id != NEW_CHAT or (text.strip()):
                    await save(chat_id, text)
            except ServiceLostError:
                return False
            except RefusedError as error:
                if error.status != HTTP_NOT_FOUND:
                    is_done = False
                    continue
            if self._unsaved.get(chat_id) == text:
                del self._unsaved[chat_id]
        return is_done

    def write_file(self) -> None:
        """Keep what is unsaved for the next start; the file is private."""
        if self._file is None:
            return
        unsaved = {chat_id: text for chat_id, text in self._unsaved.items() if text.strip()}
        if not unsaved:
            self._file.unlink(missing_ok=True)
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            json.dump(unsaved, out)
        partial.replace(self._file)

    def read_file(self) -> None:
        """Take over what the last sitting could not save; a damaged file counts as empty."""
        if self._file is None:
            return
        try:
            unsaved = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return
        if isinstance(unsaved, dict):
            self._unsaved |= {str(chat_id): text for chat_id, text in unsaved.items() if isinstance(text, str)}
