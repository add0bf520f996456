"""What widgets tell their screen. Named in the past participle."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


class PromptChanged(Message):
    """The composer's text is another one; handlers read it there, since more may have been typed meanwhile."""


class QueuedWanted(Message):
    """Up in an empty composer: a waiting turn should come back for editing."""


class EditorRequested(Message):
    """The composer's text should be edited in $EDITOR."""


@dataclass
class ChatChosen(Message):
    chat_id: str
    message_id: str | None = None
    """The message that a search found."""


class MessagePicked(Message):
    """Another message of the conversation was marked."""
