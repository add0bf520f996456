"""A store in a folder of its own, and conversations to put in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatkv.app.chats.records import Chat, Message, MessageStatus, ReplyStats
from chatkv.app.chats.store import ChatStore

TOKENIZER = "tok-1"


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


class Talk:
    """Writes turns at the end of one chat."""

    def __init__(self, store: ChatStore, chat: Chat):
        self.store = store
        self.chat = chat

    @property
    def tip_id(self) -> str | None:
        return self.store.get_chat(self.chat.id).tip_id

    def say(self, text: str, parent_id: str | None = None) -> Message:
        return self.store.add_user_turn(self.chat.id, parent_id or self.tip_id, text, [1, 2, 3], TOKENIZER)

    def answer(self, text: str, parent_id: str | None = None) -> Message:
        reply = self.store.begin_reply(self.chat.id, parent_id or self.tip_id, "model-a")
        half = len(text) // 2
        self.store.append_reply(reply.id, text[:half], [10, 11], TOKENIZER)
        self.store.append_reply(reply.id, text[half:], [12], TOKENIZER)
        return self.store.finish_reply(reply.id, MessageStatus.COMPLETE, ReplyStats(num_tokens=3, ttft_s=0.1))

    def exchange(self, question: str, reply: str) -> tuple[Message, Message]:
        return self.say(question), self.answer(reply)

    def texts(self) -> list[str]:
        return [message.content for message in self.store.path(self.chat.id)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db_file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.db"


@pytest.fixture
def store(db_file: Path, clock: Clock) -> Iterator[ChatStore]:
    with ChatStore(db_file, clock) as opened:
        yield opened


@pytest.fixture
def talk(store: ChatStore) -> Talk:
    return Talk(store, store.create_chat())
