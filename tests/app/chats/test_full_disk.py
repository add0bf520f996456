"""No space, a read-only disk: the turn is refused, nothing is half written, the store goes on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatkv.app.chats.database import ChatDatabase
from chatkv.app.chats.errors import StoreFullError
from chatkv.app.chats.records import MessageStatus
from chatkv.app.chats.store import ChatStore

from .conftest import TOKENIZER, Talk


def _contents(store: ChatStore) -> list[tuple[object, ...]]:
    return store._disk.sql.execute(
        "select id, content, status, (select count(*) from reply_chunks), (select count(*) from message_tokens), "
        "(select group_concat(tip_id || draft) from chats) from messages order by seq"
    ).fetchall()


@pytest.fixture
def full(store: ChatStore, talk: Talk) -> Talk:
    """SQLite may not grow the file by a single page (works everywhere, root or not)."""
    talk.exchange("before", "and its answer")
    store._disk.sql.execute("vacuum")
    (pages,) = store._disk.sql.execute("pragma page_count").fetchone()
    store._disk.sql.execute(f"pragma max_page_count = {pages}").fetchall()
    return talk


def test_a_turn_without_space_is_refused_whole(store: ChatStore, full: Talk) -> None:
    before = _contents(store)
    with pytest.raises(StoreFullError, match="no space left") as raised:
        full.say("x" * 100_000)
    assert "Free some disk space" in raised.value.hint
    assert _contents(store) == before
    store._disk.sql.execute("pragma max_page_count = 1000000").fetchall()
    full.exchange("x" * 100_000, "after")
    assert full.texts() == ["before", "and its answer", "x" * 100_000, "after"]


def test_a_flush_without_space_keeps_what_was_flushed(store: ChatStore, full: Talk) -> None:
    store._disk.sql.execute("pragma max_page_count = 1000000").fetchall()
    reply = store.begin_reply(full.chat.id, full.say("go").id, "m")
    store.append_reply(reply.id, "kept ", [1], TOKENIZER)
    (pages,) = store._disk.sql.execute("pragma page_count").fetchone()
    store._disk.sql.execute(f"pragma max_page_count = {pages}").fetchall()
    with pytest.raises(StoreFullError):
        store.append_reply(reply.id, "lost" * 50_000, [2], TOKENIZER)
    seen = store.get_message(reply.id, tokenizer_hash=TOKENIZER)
    assert (seen.content, seen.token_ids, seen.status) == ("kept ", (1,), MessageStatus.INCOMPLETE)
    store._disk.sql.execute("pragma max_page_count = 1000000").fetchall()
    store.append_reply(reply.id, "and on", [2], TOKENIZER)
    assert store.finish_reply(reply.id, MessageStatus.COMPLETE).content == "kept and on"


def test_every_kind_of_write_fails_whole(store: ChatStore, full: Talk) -> None:
    big = "y" * 200_000
    exported = store.export_chat(full.chat.id).replace("before", big)
    before = _contents(store)
    writes = [
        lambda: store.create_chat(big),
        lambda: store.update_chat(full.chat.id, draft=big),
        lambda: full.say(big),
        lambda: store.set_token_ids(full.tip_id or "", "other", range(50_000)),
        lambda: store.import_chat(exported),
    ]
    for write in writes:
        with pytest.raises(StoreFullError):
            write()
        assert _contents(store) == before
        assert len(store.list_chats()) == 1


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MiB where this machine lets us mount one, else a process limit on the size of files."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", mount], capture_output=True)
    if made.returncode:
        pytest.skip(
            f"needs the right to mount a tmpfs ({made.stderr.decode().strip()}); max_page_count covers the rest"
        )
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_full_file_system_refuses_turns_until_there_is_space(tiny_disk: Path) -> None:
    with ChatStore(tiny_disk / "chats.db") as store:
        talk = Talk(store, store.create_chat())
        talk.exchange("before", "fine")
        ballast = tiny_disk / "ballast"
        _fill(ballast)
        written: list[str] = []

        def talk_on() -> None:
            for number in range(10_000):
                talk.say(f"{number} " * 500)
                written.append(f"{number} " * 500)

        with pytest.raises(StoreFullError):
            talk_on()
        assert talk.texts() == ["before", "fine", *written]
        ballast.unlink()
        talk.exchange("after", "fine again")
        assert talk.texts() == ["before", "fine", *written, "after", "fine again"]
        assert store.salvage_report is None


def test_chats_on_a_full_file_system_can_still_be_opened_and_read(tiny_disk: Path) -> None:
    with ChatStore(tiny_disk / "chats.db") as store:
        talk = Talk(store, store.create_chat())
        talk.exchange("before", "fine")
    ballast = tiny_disk / "ballast"
    _fill(ballast)
    with ChatStore(tiny_disk / "chats.db") as store:
        assert Talk(store, talk.chat).texts() == ["before", "fine"]
        with pytest.raises(StoreFullError):
            Talk(store, talk.chat).say("x" * 100_000)
        ballast.unlink()
        Talk(store, talk.chat).say("y")
    with ChatStore(tiny_disk / "chats.db") as store:
        assert Talk(store, talk.chat).texts() == ["before", "fine", "y"]


def test_a_read_only_file_system_says_so(tiny_disk: Path) -> None:
    with ChatStore(tiny_disk / "chats.db") as store:
        talk = Talk(store, store.create_chat())
        talk.say("before")
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    try:
        with pytest.raises(StoreFullError, match="read-only"):
            ChatStore(tiny_disk / "chats.db")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", tiny_disk], check=True)
    with ChatStore(tiny_disk / "chats.db") as store:
        assert Talk(store, talk.chat).texts() == ["before"]


def _fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                if file.write(os.urandom(4096)) < 4096:
                    return
        except OSError:
            return


def test_traces_that_a_purge_could_not_remove_go_at_the_next_start(
    store: ChatStore, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk.exchange("quetzalcoatl", "and its answer")

    def full(database: ChatDatabase) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ChatDatabase, "write_anew", full)
        with pytest.raises(StoreFullError):
            store.purge_chat(talk.chat.id)
    assert store._disk.has_traces
    store.close()
    with ChatStore(store.file) as again:
        assert again.list_chats() == []
        assert again.purge_expired() == []
        assert not again._disk.has_traces
