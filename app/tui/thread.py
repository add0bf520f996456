"""The messages of the open conversation, kept current by events."""

from __future__ import annotations

from dataclasses import dataclass

from .board import MessageAdded, OpenChatEvent, ReplyDone, TextAdded
from .records import Message


@dataclass(frozen=True)
class Shown:
    """What the transcript has to do: the kind is append, extend, replace or reload."""

    kind: str
    index: int = -1
    text: str = ""


class Thread:
    """From the root to the tip."""

    def __init__(self, messages: tuple[Message, ...] = ()):
        self.messages = list(messages)

    @property
    def last_reply(self) -> Message | None:
        return next((message for message in reversed(self.messages) if message.is_reply), None)

    @property
    def last_prompt(self) -> Message | None:
        return next((message for message in reversed(self.messages) if not message.is_reply), None)

    def apply(self, event: OpenChatEvent) -> Shown | None:
        """Take one event of this chat; None when it tells nothing new."""
        if isinstance(event, MessageAdded):
            return self.add(event.message)
        message_id = event.message_id if isinstance(event, TextAdded) else event.message.id
        index = self._index(message_id)
        if index is None:
            return Shown("reload")
        if isinstance(event, ReplyDone):
            self.messages[index] = event.message
            return Shown("replace", index)
        return self._extend(index, event)

    def add(self, message: Message) -> Shown | None:
        if self._index(message.id) is not None:
            return None
        tip = self.messages[-1].id if self.messages else None
        if message.parent_id != tip:
            return Shown("reload")
        self.messages.append(message)
        return Shown("append", len(self.messages) - 1)

    def _extend(self, index: int, event: TextAdded) -> Shown | None:
        message, text = self.messages[index], event.text
        if event.offset is not None:
            if event.offset > message.num_source_chars:
                return Shown("reload")
            text = text[message.num_source_chars - event.offset :]
        if not text:
            return None
        self.messages[index] = extended = message.extended(text)
        return Shown("extend", index, extended.content[len(message.content) :])

    def _index(self, message_id: str) -> int | None:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].id == message_id:
                return index
        return None
