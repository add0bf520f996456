"""What widgets tell their screen. Named in the past participle."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class PromptSubmitted(Message):
    """Enter in the composer; the text may be empty."""

    text: str


@dataclass
class PromptChanged(Message):
    text: str


@dataclass
class EditorRequested(Message):
    text: str


@dataclass
class ChatChosen(Message):
    chat_id: str
    message_id: str | None = None
    """The message that a search found."""


@dataclass
class MessagePicked(Message):
    message_id: str
