"""Deleting, undoing it, and what is left of a text after it was removed for good."""

from __future__ import annotations

import random

import pytest

from chatkv.app.chats.errors import ChatNotFoundError
from chatkv.app.chats.store import ChatStore

from .conftest import Clock, Talk

DAY_S = 86_400


def test_a_deleted_chat_comes_back_whole(store: ChatStore, talk: Talk) -> None:
    question, _ = talk.exchange("a", "b")
    talk.answer("b2", parent_id=question.id)
    store.update_chat(talk.chat.id, draft="d", is_pinned=True)
    before = store.get_chat(talk.chat.id)
    assert store.trash(talk.chat.id).in_trash
    assert store.list_chats() == []
    assert [chat.id for chat in store.list_chats(in_trash=True)] == [talk.chat.id]
    assert store.restore(talk.chat.id) == before
    assert talk.texts() == ["a", "b2"]
    assert [chat.id for chat in store.list_chats()] == [talk.chat.id]


def test_trashing_twice_keeps_the_first_day(store: ChatStore, talk: Talk, clock: Clock) -> None:
    first = store.trash(talk.chat.id).trashed_at
    clock.time += DAY_S
    assert store.trash(talk.chat.id).trashed_at == first
    with pytest.raises(ChatNotFoundError):
        store.trash("nope")


def test_the_trash_is_emptied_after_thirty_days(store: ChatStore, talk: Talk, clock: Clock) -> None:
    talk.exchange("a", "b")
    kept = store.create_chat("kept")
    store.trash(talk.chat.id)
    clock.time += 29 * DAY_S
    assert store.purge_expired() == []
    store.trash(kept.id)
    clock.time += 2 * DAY_S
    assert store.purge_expired() == [talk.chat.id]
    with pytest.raises(ChatNotFoundError):
        store.get_chat(talk.chat.id)
    assert [chat.id for chat in store.list_chats(in_trash=True)] == [kept.id]
    for table in ("messages", "message_tokens", "reply_chunks"):
        assert store._disk.sql.execute(f"select count(*) from {table}").fetchone() == (0,)


def test_a_purge_leaves_forks_whole(store: ChatStore, talk: Talk) -> None:
    _, reply = talk.exchange("shared question", "shared answer")
    lost, _ = talk.exchange("only in the first", "gone")
    forks = [Talk(store, store.fork(talk.chat.id, reply.id)) for _ in range(2)]
    forks[0].say("on")
    deep = Talk(store, store.fork(forks[0].chat.id, forks[0].tip_id or ""))
    store.purge_chat(talk.chat.id)
    assert forks[0].texts() == ["shared question", "shared answer", "on"]
    assert forks[1].texts() == ["shared question", "shared answer"]
    with pytest.raises(ChatNotFoundError):
        store.get_message(lost.id)
    assert {hit.chat_id for hit in store.search("shared")} == {forks[0].chat.id}
    store.purge_chat(forks[0].chat.id)
    assert forks[1].texts() == ["shared question", "shared answer"]
    assert deep.texts() == ["shared question", "shared answer", "on"]
    assert len(store.search("shared")) == 2
    store.purge_chat(forks[1].chat.id)
    store.purge_chat(deep.chat.id)
    assert store._disk.sql.execute("select count(*) from messages").fetchone() == (0,)
    assert store._disk.sql.execute("pragma foreign_key_check").fetchall() == []


def test_nothing_of_a_purged_text_stays_in_the_files(store: ChatStore, talk: Talk) -> None:
    other = Talk(store, store.create_chat())
    other.exchange("harmless", "words")
    for number in range(20):
        talk.exchange(f"quetzalcoatl{number} secret", f"xylophonist{number} answer")
    store.update_chat(talk.chat.id, title="zygomorphic", draft="kaleidoscope")
    stored = _bytes_of_all_files(store)
    words = (b"quetzalcoatl", b"xylophonist", b"zygomorphic", b"kaleidoscope")
    assert all(word in stored for word in words)
    store.trash(talk.chat.id)
    store.purge_chat(talk.chat.id)
    stored = _bytes_of_all_files(store)
    # The index stores words without the beginning that they share with the word before.
    for word in (*words, b"lcoatl", b"phonist"):
        assert word not in stored
    assert b"harmless" in stored
    assert store.search("harmless")


@pytest.mark.parametrize("seed", [17, 20])
def test_no_copy_of_a_purged_text_stays_in_rebalanced_pages(store: ChatStore, seed: int) -> None:
    """With these seeds SQLite has left some, for all its secure_delete."""
    rng = random.Random(seed)
    talks = [Talk(store, store.create_chat()) for _ in range(rng.choice([3, 8]))]
    words: dict[str, list[str]] = {talk.chat.id: [] for talk in talks}
    for _ in range(60):
        talk, number = rng.choice(talks), rng.choice([3, 50, 400])
        word = f"{rng.getrandbits(64):016x}"
        words[talk.chat.id].append(word)
        store.add_user_turn(talk.chat.id, talk.tip_id, f"{word} {'filler ' * number}", [1] * number, "t")
    gone, kept = talks[: len(talks) // 2], talks[len(talks) // 2 :]
    for talk in gone:
        store.trash(talk.chat.id)
        store.purge_chat(talk.chat.id)
    stored = _bytes_of_all_files(store)
    assert not [word for talk in gone for word in words[talk.chat.id] if word.encode() in stored]
    for talk in kept:
        assert [text.split()[0] for text in talk.texts()] == words[talk.chat.id]
        assert all(store.search(word) for word in words[talk.chat.id])


def _bytes_of_all_files(store: ChatStore) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(store.file.parent.glob("chats.db*")))
