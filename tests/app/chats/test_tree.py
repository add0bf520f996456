"""Branches, versions and forks: nothing that was written becomes unreachable."""

from __future__ import annotations

import json
import time

import pytest

from chatkv.app.chats.errors import ChatStateError
from chatkv.app.chats.store import ChatStore

from .conftest import TOKENIZER, Talk


def test_jan8357_switching_between_versions_loses_none(store: ChatStore, talk: Talk) -> None:
    question, first = talk.exchange("why?", "because")
    follow_up = talk.say("really?")
    second = talk.answer("therefore", parent_id=question.id)
    assert talk.texts() == ["why?", "therefore"]
    assert store.siblings(first.id) == [first.id, second.id]
    assert store.siblings_on_path(talk.chat.id) == {second.id: [first.id, second.id]}
    store.update_chat(talk.chat.id, tip_id=store.newest_leaf(talk.chat.id, first.id))
    assert talk.texts() == ["why?", "because", "really?"]
    assert store.get_chat(talk.chat.id).tip_id == follow_up.id
    assert store.children(question.id) == [first.id, second.id]


def test_editing_the_first_message_makes_a_second_root(store: ChatStore, talk: Talk) -> None:
    old, _ = talk.exchange("tpyo", "what?")
    new = store.add_user_turn(talk.chat.id, None, "typo")
    assert talk.texts() == ["typo"]
    assert store.siblings(old.id) == [old.id, new.id]
    assert store.siblings_on_path(talk.chat.id) == {new.id: [old.id, new.id]}


def test_equal_answers_stay_two_rows(store: ChatStore, talk: Talk) -> None:
    question, first = talk.exchange("a", "same")
    second = talk.answer("same", parent_id=question.id)
    assert first.id != second.id
    assert store.siblings(second.id) == [first.id, second.id]


def test_a_fork_shares_rows_and_then_goes_its_own_way(store: ChatStore, talk: Talk) -> None:
    question, reply = talk.exchange("a", "b")
    talk.exchange("c", "d")
    fork = store.fork(talk.chat.id, reply.id)
    branch = Talk(store, fork)
    assert [message.id for message in store.path(fork.id)] == [question.id, reply.id]
    assert all(message.chat_id == fork.id for message in store.path(fork.id))
    branch.exchange("e", "f")
    talk.say("g")
    assert branch.texts() == ["a", "b", "e", "f"]
    assert talk.texts() == ["a", "b", "c", "d", "g"]
    (num_rows,) = store._disk.sql.execute("select count(*) from messages").fetchone()
    assert num_rows == 7


def test_a_fork_does_not_show_up_as_a_branch(store: ChatStore, talk: Talk) -> None:
    _, reply = talk.exchange("a", "b")
    fork = Talk(store, store.fork(talk.chat.id, reply.id))
    mine, theirs = talk.say("mine"), fork.say("theirs")
    assert store.siblings(mine.id) == [mine.id]
    assert store.siblings(theirs.id) == [theirs.id]
    assert store.siblings_on_path(talk.chat.id) == store.siblings_on_path(fork.chat.id) == {}


def test_a_fork_that_edits_its_first_message_keeps_the_old_one(store: ChatStore, talk: Talk) -> None:
    root, reply = talk.exchange("a", "b")
    fork = store.fork(talk.chat.id, reply.id)
    edited = store.add_user_turn(fork.id, None, "a2")
    assert store.siblings(edited.id) == [root.id, edited.id]
    assert store.newest_leaf(fork.id, root.id) == reply.id
    assert store.siblings_on_path(talk.chat.id) == {}


def test_a_fork_of_a_fork_reaches_the_first_root(store: ChatStore, talk: Talk) -> None:
    texts = ["a", "b"]
    talk.exchange("a", "b")
    current = talk
    for number in range(3):
        current = Talk(store, store.fork(current.chat.id, current.tip_id or ""))
        current.exchange(f"q{number}", f"r{number}")
        texts += [f"q{number}", f"r{number}"]
        assert current.texts() == texts


def test_the_start_of_the_context_goes_with_a_fork_that_holds_it(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    third, fourth = talk.exchange("c", "d")
    store.update_chat(talk.chat.id, context_start_id=third.id)
    assert store.fork(talk.chat.id, fourth.id).context_start_id == third.id
    first = store.path(talk.chat.id)[0]
    assert store.fork(talk.chat.id, first.id).context_start_id is None
    assert talk.texts() == ["a", "b", "c", "d"]


def test_a_tip_must_be_in_the_chat(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    other = Talk(store, store.create_chat())
    foreign = other.say("x")
    with pytest.raises(ChatStateError):
        store.update_chat(talk.chat.id, tip_id=foreign.id)
    with pytest.raises(ChatStateError):
        store.fork(talk.chat.id, foreign.id)


def test_a_ring_of_parents_does_not_hang(store: ChatStore, talk: Talk) -> None:
    first, second = talk.exchange("a", "b")
    store._disk.sql.execute("update messages set parent_id = ? where id = ?", [second.id, first.id])
    assert talk.texts() == ["a", "b"]
    assert store.siblings_on_path(talk.chat.id) == {}


def test_two_thousand_messages_open_in_time(store: ChatStore) -> None:
    messages = [
        {
            "id": str(number),
            "parent_id": str(number - 1) if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": f"message {number} " * 40,
            "token_ids": {TOKENIZER: [7] * 150},
        }
        for number in range(2000)
    ]
    export = {"format": "chatkv-chat", "version": 1, "chat": {"tip_id": "1999"}, "messages": messages}
    chat = store.import_chat(json.dumps(export)).chat
    best = min(_timed(lambda: store.path(chat.id)) for _ in range(5))
    with_ids = min(_timed(lambda: store.path(chat.id, tokenizer_hash=TOKENIZER)) for _ in range(5))
    assert [message.content for message in store.path(chat.id)] == [message["content"] for message in messages]
    # Measured: 18 and 30 ms of CPU time; the bounds leave room for a busy machine.
    assert best < 0.1, best
    assert with_ids < 0.15, with_ids


def test_five_thousand_chats_are_listed_in_time(store: ChatStore) -> None:
    for number in range(5000):
        store.create_chat(f"chat {number}")
    assert min(_timed(lambda: store.list_chats(limit=100)) for _ in range(5)) < 0.1
    assert len(store.list_chats("chat 499")) == 15


def _timed(call: object) -> float:
    start = time.process_time()
    call()  # type: ignore[operator]
    return time.process_time() - start
