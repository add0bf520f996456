"""Export and import: nothing lost, nothing twice, nothing half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.app.chats import chats, export, importing, schema
from chatkv.app.chats.database import ChatDatabase
from chatkv.app.chats.errors import ImportRefusedError
from chatkv.app.chats.records import ChatSettings, MessageStatus, ReplyStats
from chatkv.app.chats.store import ChatStore

from .conftest import TOKENIZER, Talk


@pytest.fixture
def told(store: ChatStore, talk: Talk) -> Talk:
    question, _ = talk.exchange("a 🎉\n\0", "b")
    talk.say("follow-up")
    reply = store.begin_reply(talk.chat.id, question.id, "m2")
    store.append_reply(reply.id, "half an ans", [5, 6], TOKENIZER)
    store.finish_reply(reply.id, MessageStatus.ERROR, ReplyStats(cached_by_tier={"device": 16}), error="it broke")
    store.update_chat(
        talk.chat.id,
        title="T",
        draft="d",
        is_pinned=True,
        model="m",
        context_start_id=question.id,
        settings=ChatSettings(system="S", temperature=0.3, seed=1),
    )
    return talk


def _without_ids(text: str) -> object:
    document = json.loads(text)
    ids = {message["id"]: number for number, message in enumerate(document["messages"])}
    document["chat"]["id"] = None
    for holder, names in [(document["chat"], ("tip_id", "context_start_id"))] + [
        (message, ("id", "parent_id")) for message in document["messages"]
    ]:
        for name in names:
            holder[name] = ids.get(holder[name])
    return document


def test_a_json_export_loses_nothing(told: Talk, tmp_path: Path) -> None:
    exported = told.store.export_chat(told.chat.id)
    with ChatStore(tmp_path / "elsewhere.db") as other:
        result = other.import_chat(exported)
        assert (result.is_duplicate, result.num_messages) == (False, 4)
        assert _without_ids(other.export_chat(result.chat.id)) == _without_ids(exported)
        tip = other.path(result.chat.id, tokenizer_hash=TOKENIZER)[-1]
        assert (tip.content, tip.token_ids, tip.status, tip.error) == (
            "half an ans",
            (5, 6),
            MessageStatus.ERROR,
            "it broke",
        )
        assert other.search("follow")


def test_the_same_chat_is_not_taken_twice(told: Talk) -> None:
    exported = told.store.export_chat(told.chat.id)
    result = told.store.import_chat(exported)
    assert (result.is_duplicate, result.chat.id, result.num_messages) == (True, told.chat.id, 0)
    told.store.trash(told.chat.id)
    assert not told.store.import_chat(exported).is_duplicate
    assert told.store.import_chat(exported).is_duplicate


def test_a_chat_that_grew_elsewhere_is_another_chat(told: Talk) -> None:
    document = json.loads(told.store.export_chat(told.chat.id))
    document["messages"].append(
        {"id": "new", "parent_id": document["chat"]["tip_id"], "role": "user", "content": "more", "created_at": 5}
    )
    result = told.store.import_chat(json.dumps(document))
    assert not result.is_duplicate
    assert len(told.store.list_chats()) == 2


def test_a_fork_exports_what_it_took_over(told: Talk) -> None:
    fork = told.store.fork(told.chat.id, told.tip_id or "")
    Talk(told.store, fork).say("only in the fork")
    document = json.loads(told.store.export_chat(fork.id))
    assert [message["content"] for message in document["messages"]] == ["a 🎉\n\0", "half an ans", "only in the fork"]


def test_a_reply_being_written_is_exported_as_it_stands(store: ChatStore, talk: Talk, tmp_path: Path) -> None:
    reply = store.begin_reply(talk.chat.id, talk.say("a").id, "m")
    store.append_reply(reply.id, "so far", [1], TOKENIZER)
    with ChatStore(tmp_path / "elsewhere.db") as other:
        chat = other.import_chat(store.export_chat(talk.chat.id)).chat
        tip = other.path(chat.id)[-1]
        assert (tip.content, tip.status) == ("so far", MessageStatus.STOPPED)


def test_markdown_shows_the_path_to_the_tip(told: Talk) -> None:
    text = told.store.export_chat(told.chat.id, "markdown")
    assert text.startswith("# T\n\n## System prompt\n\nS\n\n## You (1970-01-12")
    assert "## Assistant (1970-01-12 13:46 UTC, m2, error)\n\nhalf an ans\n\n> Error: it broke\n" in text
    assert "follow-up" not in text


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("format"),
        lambda d: d.update(version=2),
        lambda d: d.pop("messages"),
        lambda d: d.update(messages="x"),
        lambda d: d.update(chat=None),
        lambda d: d["chat"].update(sampling={"temperature": "hot"}),
        lambda d: d["messages"][0].update(content=5),
        lambda d: d["messages"][0].update(role="king"),
        lambda d: d["messages"][0].update(parent_id="nowhere"),
        lambda d: d["messages"][0].update(parent_id=d["messages"][-1]["id"]),
        lambda d: d["messages"][1].update(id=d["messages"][0]["id"]),
        lambda d: d["messages"][0].update(token_ids={"t": [-1]}),
        lambda d: d["messages"][0].update(token_ids={"t": ["x"]}),
        lambda d: d["messages"][0].update(token_ids=[1]),
        lambda d: d["messages"][0].update(num_tokens=[]),
        lambda d: d["messages"][0].update(stats={"ttft_s": "soon"}),
    ],
)
def test_what_is_no_export_is_refused_whole(told: Talk, change) -> None:
    document = json.loads(told.store.export_chat(told.chat.id))
    change(document)
    with pytest.raises(ImportRefusedError, match="export"):
        told.store.import_chat(json.dumps(document))
    assert len(told.store.list_chats()) == 1


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "3", "[" * 100_000, '{"format": "chatkv-chat"}'])
def test_what_is_no_json_is_refused(store: ChatStore, text: str) -> None:
    with pytest.raises(ImportRefusedError):
        store.import_chat(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def scratch() -> ChatDatabase:
    db = ChatDatabase.in_memory(lambda: 1.0)
    schema.upgrade(db.sql)
    return db


@given(data=st.data())
def test_any_value_in_any_field_is_taken_or_refused(scratch: ChatDatabase, data: st.DataObject) -> None:
    message = {"id": "a", "parent_id": None, "role": "user", "content": "x", "status": "complete", "error": None}
    message |= {"created_at": 1.0, "model": None, "num_tokens": 1, "stats": None, "token_ids": {}}
    document = {"format": "chatkv-chat", "version": 1, "chat": {"title": "t", "tip_id": "a"}, "messages": [message]}
    holder = data.draw(st.sampled_from([document, document["chat"], message]))
    names = [*holder, "is_pinned", "updated_at", "sampling", "context_start_id"]
    holder[data.draw(st.sampled_from(names))] = data.draw(json_values)
    num_chats = len(chats.summaries(scratch, "", False))
    try:
        chat = importing.import_json(scratch, json.dumps(document)).chat
    except ImportRefusedError:
        assert len(chats.summaries(scratch, "", False)) == num_chats
    else:
        again = importing.import_json(scratch, export.as_json(scratch, chat.id))
        assert again.is_duplicate or not document["messages"]
