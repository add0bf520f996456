"""Search takes what a person types."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.app.chats import schema, search
from chatkv.app.chats.database import ChatDatabase
from chatkv.app.chats.records import SearchHit
from chatkv.app.chats.store import ChatStore

from .conftest import Talk


@pytest.fixture
def full(store: ChatStore, talk: Talk) -> ChatStore:
    talk.exchange("How do I use the borrow-checker in Rust?", 'Read the "book", chapter 4; NOT the reference.')
    talk.exchange("Über Café und naïve Größen", "東京タワーは高い 🎉 100% sure")
    return store


@pytest.mark.parametrize(
    ("query", "num_hits"),
    [
        ("rust", 1),
        ("RUST borrow", 1),
        ("borrow-checker", 1),
        ("chec", 1),  # "borrow-checker" is two words.
        ("hecker", 0),
        ("chapt", 1),
        ("chapt reference", 0),  # Only the last word is a prefix.
        ('"book"', 1),
        ('"book', 1),
        ("NOT", 1),
        ("uber cafe", 1),
        ("größen", 1),
        ("タワー", 1),
        ("🎉", 1),
        ("🎉 sure", 1),
        ("100%", 1),
        ("rust AND OR NEAR( *", 0),
        ("content:rust", 0),
        ("", 0),
        ("   ", 0),
        ("\0", 0),
        ("rust\0", 1),
        ("\ud800", 0),
    ],
)
def test_a_query_finds_what_it_says(full: ChatStore, query: str, num_hits: int) -> None:
    assert len(full.search(query)) == num_hits


def test_a_hit_says_where_the_words_are(full: ChatStore, talk: Talk) -> None:
    (hit,) = full.search("chapter read")
    assert isinstance(hit, SearchHit)
    assert hit.chat_id == talk.chat.id
    assert hit.title == "How do I use the borrow-checker in Rust?"
    assert [hit.snippet[start:end] for start, end in hit.marks] == ["Read", "chapter"]
    (emoji,) = full.search("🎉")
    assert [emoji.snippet[start:end] for start, end in emoji.marks] == ["🎉"]


def test_a_snippet_is_one_short_line(store: ChatStore, talk: Talk) -> None:
    talk.say("\n".join(["filler text"] * 500 + ["the needle lies here"] + ["more\ttext"] * 500))
    (hit,) = store.search("needle")
    assert "needle" in hit.snippet
    assert "\n" not in hit.snippet
    assert "\t" not in hit.snippet
    assert len(hit.snippet) < 300


def test_the_list_of_chats_finds_titles_and_texts(full: ChatStore, talk: Talk) -> None:
    named = full.create_chat("Größte Städte")
    assert [chat.id for chat in full.list_chats("grosste stadte")] == [named.id]
    assert [chat.id for chat in full.list_chats("größ")] == [named.id, talk.chat.id]
    assert [chat.id for chat in full.list_chats("STAD")] == [named.id]
    assert [chat.id for chat in full.list_chats("borrow checker")] == [talk.chat.id]


def test_a_streamed_reply_is_found_once_it_ended(store: ChatStore, talk: Talk) -> None:
    talk.exchange("q", "streamed zebra")
    assert [hit.message_id for hit in store.search("zebra")] == [talk.tip_id]


def test_trashed_chats_are_not_found_but_a_fork_of_them_is(store: ChatStore, talk: Talk) -> None:
    _, reply = talk.exchange("unicorn", "rainbow")
    fork = store.fork(talk.chat.id, reply.id)
    assert [hit.chat_id for hit in store.search("unicorn")] == [talk.chat.id]
    store.trash(talk.chat.id)
    assert [hit.chat_id for hit in store.search("unicorn")] == [fork.id]
    assert [chat.id for chat in store.list_chats("unicorn")] == [fork.id]
    store.trash(fork.id)
    assert store.search("unicorn") == []
    assert {chat.id for chat in store.list_chats("unicorn", in_trash=True)} == {talk.chat.id, fork.id}


def test_the_limit_holds(store: ChatStore, talk: Talk) -> None:
    for _ in range(5):
        talk.exchange("zebra", "zebra")
    assert len(store.search("zebra", limit=3)) == 3
    assert store.search("zebra", limit=0) == []


@pytest.fixture(scope="module")
def scratch() -> ChatDatabase:
    db = ChatDatabase.in_memory(lambda: 1.0)
    schema.upgrade(db.sql)
    with db.write() as sql:
        sql.execute("insert into chats(id, title, settings, created_at, updated_at) values ('c', 't', '{}', 1, 1)")
    return db


any_text = st.text(st.characters(codec=None), max_size=60) | st.text(
    st.sampled_from("\"'*^-+():{}[]<>NEARADOTnot \0\n\u200d🎉東é.,;%_"), max_size=60
)


@given(query=any_text)
def test_no_query_raises(scratch: ChatDatabase, query: str) -> None:
    assert search.search(scratch, query, 10) is not None
    assert search.chat_ids(scratch, query) <= {"c"}


@given(content=any_text.filter(lambda text: "\0" not in text), data=st.data())
def test_every_word_of_a_text_finds_it(scratch: ChatDatabase, content: str, data: st.DataObject) -> None:
    content = content.encode("utf-8", "replace").decode()
    with scratch.write() as sql:
        sql.execute("delete from messages")
        sql.execute(
            "insert into messages(id, chat_id, depth, role, content, status, created_at) "
            "values ('m', 'c', 1, 'user', ?, 'complete', 1)",
            [content],
        )
    words = [word for word in content.split() if search.parse(word).words or search.parse(word).pieces]
    if words:
        word = data.draw(st.sampled_from(words))
        assert [hit.message_id for hit in search.search(scratch, word, 10)] == ["m"], word


def test_a_damaged_index_is_rebuilt_by_the_search_that_meets_it(store: ChatStore, talk: Talk) -> None:
    talk.exchange("needle", "hay")
    store._disk.sql.execute("delete from messages_fts_data where id > 10")
    assert [hit.snippet for hit in store.search("needle")] == ["needle"]
    assert store.salvage_report is None
