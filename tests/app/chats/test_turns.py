"""Turns, replies that grow, settings and drafts."""

from __future__ import annotations

import sqlite3

import pytest

from chatkv.app.chats import turns
from chatkv.app.chats.errors import ChatNotFoundError, ChatStateError
from chatkv.app.chats.records import ChatSettings, MessageStatus, ReplyStats, Role
from chatkv.app.chats.store import ChatStore

from .conftest import TOKENIZER, Clock, Talk


def test_a_turn_and_its_reply_read_back_whole(store: ChatStore, talk: Talk) -> None:
    talk.exchange("Wie weit ist es nach Köln? 🚆", "Etwa 40 km.")
    first, second = store.path(talk.chat.id, tokenizer_hash=TOKENIZER)
    assert (first.role, first.content, first.token_ids) == (Role.USER, "Wie weit ist es nach Köln? 🚆", (1, 2, 3))
    assert (second.role, second.content, second.token_ids) == (Role.ASSISTANT, "Etwa 40 km.", (10, 11, 12))
    assert second.status is MessageStatus.COMPLETE
    assert second.parent_id == first.id
    assert second.stats == ReplyStats(num_tokens=3, ttft_s=0.1)
    assert store.path(talk.chat.id)[1].token_ids is None
    assert store.path(talk.chat.id, tokenizer_hash="another")[1].token_ids is None


def test_a_turn_begins_with_message_and_reply_or_not_at_all(
    store: ChatStore, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, reply = store.begin_turn(talk.chat.id, None, "hello", "m")
    assert (reply.parent_id, reply.status, talk.tip_id) == (user.id, MessageStatus.INCOMPLETE, reply.id)
    store.finish_reply(reply.id, MessageStatus.COMPLETE)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(turns, "_add_reply", full)
    with pytest.raises(sqlite3.OperationalError):
        store.begin_turn(talk.chat.id, reply.id, "again", "m")
    assert talk.texts() == ["hello", ""]
    assert talk.tip_id == reply.id


def test_a_growing_reply_is_whole_at_every_moment(store: ChatStore, talk: Talk) -> None:
    reply = store.begin_reply(talk.chat.id, talk.say("count").id, "m")
    written, ids = "", ()
    for number in range(50):
        store.append_reply(reply.id, f"{number} ", [number], TOKENIZER)
        written, ids = written + f"{number} ", (*ids, number)
        seen = store.get_message(reply.id, tokenizer_hash=TOKENIZER)
        assert (seen.content, seen.token_ids, seen.num_tokens) == (written, ids, number + 1)
        assert seen.status is MessageStatus.INCOMPLETE
    ended = store.finish_reply(reply.id, MessageStatus.STOPPED)
    assert (ended.content, ended.num_tokens) == (written, 50)
    assert store.path(talk.chat.id)[-1].content == written


def test_a_flush_costs_the_same_however_long_the_reply_is(store: ChatStore, talk: Talk) -> None:
    """Pages written by one flush, counted by SQLite: not a second copy of the text."""
    reply = store.begin_reply(talk.chat.id, talk.say("write a book").id, "m")
    connection = store._disk.sql.conn

    def frames_of_a_flush() -> int:
        connection.execute("pragma wal_checkpoint(truncate)").fetchall()
        store.append_reply(reply.id, "x" * 40, list(range(8)), TOKENIZER)
        return connection.execute("pragma wal_checkpoint(passive)").fetchone()[1]

    short = frames_of_a_flush()
    store.append_reply(reply.id, "y" * 2_000_000, list(range(100_000)), TOKENIZER)
    assert 0 < frames_of_a_flush() <= short + 3


def test_ids_given_at_the_end_replace_the_flushed_ones(store: ChatStore, talk: Talk) -> None:
    reply = store.begin_reply(talk.chat.id, talk.say("go").id, "m")
    store.append_reply(reply.id, "one two", [1, 2, 3], TOKENIZER)
    store.finish_reply(reply.id, MessageStatus.COMPLETE, token_ids=[1, 2], tokenizer_hash=TOKENIZER)
    assert store.get_message(reply.id, tokenizer_hash=TOKENIZER).token_ids == (1, 2)


def test_a_stopped_reply_is_continued_after_its_text_and_ids(store: ChatStore, talk: Talk) -> None:
    reply = talk.exchange("tell", "Once upon")[1]
    reopened = store.reopen_reply(reply.id)
    assert (reopened.status, reopened.content) == (MessageStatus.INCOMPLETE, "Once upon")
    store.append_reply(reply.id, " a time", [13, 14], TOKENIZER)
    assert store.get_message(reply.id, tokenizer_hash=TOKENIZER).token_ids == (10, 11, 12, 13, 14)
    ended = store.finish_reply(reply.id, MessageStatus.COMPLETE)
    assert ended.content == "Once upon a time"
    assert store.get_message(reply.id, tokenizer_hash=TOKENIZER).token_ids == (10, 11, 12, 13, 14)


def test_ids_of_two_tokenizers_in_one_reply_are_dropped(store: ChatStore, talk: Talk) -> None:
    reply = talk.exchange("tell", "Once upon")[1]
    store.reopen_reply(reply.id)
    store.append_reply(reply.id, " a time", [7], "tok-2")
    store.finish_reply(reply.id, MessageStatus.COMPLETE)
    for name in (TOKENIZER, "tok-2"):
        assert store.get_message(reply.id, tokenizer_hash=name).token_ids is None


def test_reopening_and_ending_without_a_token_keeps_the_ids(store: ChatStore, talk: Talk) -> None:
    reply = talk.exchange("tell", "Once upon")[1]
    store.reopen_reply(reply.id)
    store.finish_reply(reply.id, MessageStatus.STOPPED)
    assert store.get_message(reply.id, tokenizer_hash=TOKENIZER).token_ids == (10, 11, 12)


def test_what_cannot_be_done_says_why_and_changes_nothing(store: ChatStore, talk: Talk) -> None:
    question, reply = talk.exchange("a", "b")
    other = store.create_chat()
    with pytest.raises(ChatStateError, match="not in this chat"):
        store.add_user_turn(other.id, reply.id, "x")
    with pytest.raises(ChatStateError, match="not being written"):
        store.append_reply(reply.id, "x")
    with pytest.raises(ChatStateError, match="Only a reply"):
        store.reopen_reply(question.id)
    with pytest.raises(ChatNotFoundError):
        store.add_user_turn("nope", None, "x")
    with pytest.raises(ChatNotFoundError):
        store.append_reply("nope", "x")
    growing = store.begin_reply(talk.chat.id, talk.say("c").id, "m")
    with pytest.raises(ChatStateError, match="still being written"):
        talk.say("too early")
    store.finish_reply(growing.id, MessageStatus.COMPLETE)
    store.trash(talk.chat.id)
    with pytest.raises(ChatStateError, match="trash"):
        talk.say("x")
    assert talk.texts() == ["a", "b", "c", ""]


def test_a_reply_that_the_conversation_went_past_is_not_reopened(store: ChatStore, talk: Talk) -> None:
    reply = talk.exchange("a", "b")[1]
    talk.say("c")
    with pytest.raises(ChatStateError, match="went on"):
        store.reopen_reply(reply.id)


def test_a_shared_reply_is_continued_as_a_copy_in_either_chat(store: ChatStore, talk: Talk) -> None:
    _, shared = talk.exchange("tell me", "Once upon")
    fork = store.fork(talk.chat.id, shared.id)
    for chat_id, rest in ((fork.id, " a time"), (talk.chat.id, " a mattress")):
        copy = store.reopen_reply(shared.id, chat_id)
        assert (copy.chat_id, copy.parent_id, copy.content) == (chat_id, shared.parent_id, "Once upon")
        assert copy.id != shared.id
        store.append_reply(copy.id, rest, [13], TOKENIZER)
        store.finish_reply(copy.id, MessageStatus.COMPLETE)
        *_, tip = store.path(chat_id, tokenizer_hash=TOKENIZER)
        assert (tip.id, tip.content, tip.token_ids) == (copy.id, "Once upon" + rest, (10, 11, 12, 13))
        assert store.siblings(copy.id, chat_id) == [shared.id, copy.id]
    assert store.get_message(shared.id).content == "Once upon"


def test_settings_draft_and_pin_are_kept_per_chat(db_file, store: ChatStore, talk: Talk) -> None:
    settings = ChatSettings(system="Be brief.", temperature=0.5, top_k=40, seed=7)
    store.update_chat(talk.chat.id, settings=settings, draft="half a thou", is_pinned=True, model="m")
    other = store.create_chat("other")
    store.close()
    with ChatStore(db_file) as again:
        chat = again.get_chat(talk.chat.id)
        assert (chat.settings, chat.draft, chat.is_pinned, chat.model) == (settings, "half a thou", True, "m")
        assert again.get_chat(other.id).settings == ChatSettings()
        assert again.update_chat(talk.chat.id, model=None).model is None
        assert again.get_chat(talk.chat.id).draft == "half a thou"


def test_sending_clears_the_draft_that_was_sent_and_no_other(store: ChatStore, talk: Talk) -> None:
    store.update_chat(talk.chat.id, draft="hello ")
    talk.say("hello")
    assert store.get_chat(talk.chat.id).draft == ""
    store.update_chat(talk.chat.id, draft="something else")
    talk.say("from another window")
    assert store.get_chat(talk.chat.id).draft == "something else"


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("\n\n  Plan  a trip\nto Porto", "Plan a trip"),
        ("word " * 40, "word word word word word word word word word word word…"),
        ("x" * 200, "x" * 59 + "…"),
        ("  \n", ""),
    ],
)
def test_an_untitled_chat_takes_its_title_from_the_first_message(talk: Talk, content: str, title: str) -> None:
    talk.say(content)
    assert talk.store.get_chat(talk.chat.id).title == title
    talk.say("something else")
    assert talk.store.get_chat(talk.chat.id).title == (title or "something else")


def test_text_that_utf8_cannot_hold_is_mended_not_refused(store: ChatStore, talk: Talk) -> None:
    assert talk.say("half \ud83d pair").content == "half � pair"
    assert talk.say("\ud83c\udf89 joined, nul \0 kept").content == "🎉 joined, nul \0 kept"
    assert store.update_chat(talk.chat.id, title="\udcff").title == "�"


def test_the_list_is_ordered_by_pin_and_last_turn_only(store: ChatStore, clock: Clock) -> None:
    chats = [store.create_chat(f"chat {number}") for number in range(4)]
    store.add_user_turn(chats[1].id, None, "hello")
    store.update_chat(chats[0].id, is_pinned=True)
    store.update_chat(chats[2].id, title="renamed", draft="d")
    assert [chat.id for chat in store.list_chats()] == [chats[at].id for at in (0, 1, 3, 2)]
    assert [chat.id for chat in store.list_chats(limit=2, offset=1)] == [chats[1].id, chats[3].id]


def test_a_summary_counts_the_path_and_not_the_branches(store: ChatStore, talk: Talk) -> None:
    question, _ = talk.exchange("a", "b")
    talk.answer("b2", parent_id=question.id)
    summary = store.list_chats()[0]
    assert (summary.num_messages, summary.num_tokens) == (2, 6)
    assert summary.to_json("writing")["state"] == "writing"


def test_json_has_the_fields_that_clients_read(store: ChatStore, talk: Talk) -> None:
    reply = talk.exchange("a", "b")[1]
    assert set(reply.to_json()) == set(
        "id chat_id parent_id role content status error created_at model num_tokens stats".split()
    )
    assert set(reply.to_json()["stats"]) == set(
        "num_prompt_tokens num_cached_tokens cached_by_tier ttft_s tokens_per_s num_tokens prefill_s chatkv".split()
    )
    summary = set(
        "id title updated_at created_at is_pinned is_private model num_messages num_tokens state in_trash".split()
    )
    assert set(store.list_chats()[0].to_json()) == summary
    assert set(store.get_chat(talk.chat.id).to_json()) == summary | {
        "system",
        "sampling",
        "draft",
        "tip_id",
        "context_start_id",
    }
