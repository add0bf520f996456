"""Private chats: the same interface, nothing on disk, gone at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatkv.app.chats.errors import ChatNotFoundError
from chatkv.app.chats.store import ChatStore

from .conftest import Clock, Talk


@pytest.fixture
def private(store: ChatStore) -> Talk:
    return Talk(store, store.create_chat(is_private=True))


def test_a_private_chat_works_like_any_other(store: ChatStore, talk: Talk, private: Talk) -> None:
    talk.exchange("public zebra", "x")
    _, reply = private.exchange("private zebra", "y")
    fork = store.fork(private.chat.id, reply.id)
    assert fork.is_private
    assert private.texts() == ["private zebra", "y"]
    assert [chat.id for chat in store.list_chats()] == [fork.id, private.chat.id, talk.chat.id]
    assert [chat.is_private for chat in store.list_chats()] == [True, True, False]
    assert {hit.chat_id for hit in store.search("zebra")} == {private.chat.id, talk.chat.id}
    store.trash(private.chat.id)
    assert [chat.id for chat in store.list_chats()] == [fork.id, talk.chat.id]
    store.restore(private.chat.id)
    assert "private zebra" in store.export_chat(private.chat.id, "markdown")


def test_a_private_chat_never_touches_the_disk(store: ChatStore, private: Talk) -> None:
    for _ in range(50):
        private.exchange("quetzalcoatl " * 200, "xylophonist " * 200)
    assert store.search("quetzalcoatl")
    stored = b"".join(file.read_bytes() for file in store.file.parent.iterdir())
    assert b"quetzalcoatl" not in stored
    assert b"xylophonist" not in stored


def test_a_private_chat_is_gone_at_the_end(db_file: Path, clock: Clock) -> None:
    with ChatStore(db_file, clock) as store:
        private = Talk(store, store.create_chat(is_private=True))
        private.say("secret")
    with ChatStore(db_file, clock) as store:
        assert store.list_chats() == []
        with pytest.raises(ChatNotFoundError):
            store.get_chat(private.chat.id)


def test_private_trash_is_purged_too(store: ChatStore, private: Talk, clock: Clock) -> None:
    store.trash(private.chat.id)
    clock.time += 31 * 86_400
    assert store.purge_expired() == [private.chat.id]
