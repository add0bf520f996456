"""What was typed and not sent. Saved with the chat a moment after the last key; in a file when no service answers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from .ports import RefusedError, ServiceLostError

HTTP_NOT_FOUND = 404
"""The chat is gone for good; its draft goes with it."""
_NEW_CHAT = "new:"
_NEW_PRIVATE_CHAT = "new:private:"


def new_chat_key(is_private: bool = False) -> str:
    """What stands for the id of a chat that the service does not know yet."""
    return (_NEW_PRIVATE_CHAT if is_private else _NEW_CHAT) + secrets.token_hex(8)


def is_new(key: str) -> bool:
    return key.startswith(_NEW_CHAT)


def is_new_private(key: str) -> bool:
    return key.startswith(_NEW_PRIVATE_CHAT)


class Drafts:
    """Unsaved drafts by the key of their chat: its id, or that of a new one.

    `file` holds what could not be given to the service before the app ended.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._unsaved: dict[str, str] = {}
        self._private_keys: set[str] = set()

    def put(self, key: str, text: str, *, is_private: bool = False) -> None:
        """A private chat's draft never reaches the file."""
        self._unsaved[key] = text
        if is_private:
            self._private_keys.add(key)

    def pending(self, key: str) -> str | None:
        """The text not yet saved, newer than the service's."""
        return self._unsaved.get(key)

    @property
    def new_chats(self) -> list[str]:
        """Keys of the new chats with an unsaved draft."""
        return [key for key in self._unsaved if is_new(key)]

    @property
    def is_saved(self) -> bool:
        return not self._unsaved

    async def flush(self, save: Callable[[str, str], Awaitable[None]]) -> bool:
        """Give every draft to `save(key, text)`; False when the service did not take them all.

        An empty draft of a new chat is forgotten.
        """
        is_done = True
        for key, text in list(self._unsaved.items()):
            try:
                if text.strip() or not is_new(key):
                    await save(key, text)
            except ServiceLostError:
                return False
            except RefusedError as error:
                if error.status != HTTP_NOT_FOUND:
                    is_done = False
                    continue
            if self._unsaved.get(key) == text:
                del self._unsaved[key]
        return is_done

    def write_file(self) -> None:
        """Keep what is unsaved for the next start; the file is private."""
        if self._file is None:
            return
        unsaved = {key: text for key, text in self._unsaved.items() if text.strip() and key not in self._private_keys}
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
            self._unsaved |= {str(key): text for key, text in unsaved.items() if isinstance(text, str)}
