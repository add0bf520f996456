"""The process dies, or the machine: what was written is there."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from chatkv.app.chats.errors import StoreBusyError
from chatkv.app.chats.records import MessageStatus
from chatkv.app.chats.store import ChatStore

from .conftest import TOKENIZER, Talk

WRITER = """
import sys, time
from pathlib import Path
from chatkv.app.chats.store import ChatStore
store = ChatStore(Path(sys.argv[1]))
chat = store.create_chat()
turn = store.add_user_turn(chat.id, None, "the question", [1, 2], "tok-1")
reply = store.begin_reply(chat.id, turn.id, "m")
number = 0
while True:
    store.append_reply(reply.id, f"{number} ", [number], "tok-1")
    number += 1
    print(number, flush=True)
"""


def _killed_writer(db_file: Path, after: int) -> int:
    """Kill a process in the middle of a reply; returns how many flushes it had reported."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(db_file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        reported = int(line)
        if reported >= after:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    return int(rest[-1]) if rest else reported


@pytest.mark.parametrize("after", [1, 40, 400])
def test_a_kill_in_the_middle_of_a_reply_loses_nothing_that_was_flushed(db_file: Path, after: int) -> None:
    flushed = _killed_writer(db_file, after)
    with ChatStore(db_file) as store:
        assert store.num_recovered_replies == 1
        assert store.salvage_report is None
        (chat,) = store.list_chats()
        question, reply = store.path(chat.id, tokenizer_hash=TOKENIZER)
        assert (question.content, question.token_ids) == ("the question", (1, 2))
        assert reply.status is MessageStatus.STOPPED
        # The flush whose report was cut off may be there too.
        assert reply.token_ids in (tuple(range(flushed)), tuple(range(flushed + 1)))
        assert reply.content == "".join(f"{number} " for number in reply.token_ids)
        assert reply.num_tokens == len(reply.token_ids)
        (left,) = store._disk.sql.execute("select count(*) from reply_chunks").fetchone()
        assert left == 0
        reopened = store.reopen_reply(reply.id)
        assert reopened.content == reply.content
        store.finish_reply(reply.id, MessageStatus.STOPPED)
    with ChatStore(db_file) as store:
        assert store.num_recovered_replies == 0


def test_killing_it_again_and_again_keeps_everything(db_file: Path) -> None:
    totals = [_killed_writer(db_file, 5) for _ in range(3)]
    with ChatStore(db_file) as store:
        lengths = sorted(
            len(store.path(chat.id, tokenizer_hash=TOKENIZER)[1].token_ids or ()) for chat in store.list_chats()
        )
        assert len(lengths) == 3
        assert all(any(length in (total, total + 1) for total in totals) for length in lengths)


def test_the_turn_is_synced_before_the_call_returns_and_a_flush_is_not(
    store: ChatStore, talk: Talk, tmp_path: Path
) -> None:
    """What the disk holds after a power cut: here, what the setting asks SQLite for at the moment of the commit."""
    seen: list[tuple[str, int]] = []
    connection = store._disk.sql.conn

    def note(statement: str) -> None:
        words = statement.lower().split()
        if words[:2] == ["pragma", "synchronous"]:
            seen.append((words[-1], 0))
        if words == ["commit"]:
            seen.append(("commit", 0))

    connection.set_trace_callback(note)
    turn = talk.say("important")
    assert [name for name, _ in seen] == ["full", "commit"]
    seen.clear()
    reply = store.begin_reply(talk.chat.id, turn.id, "m")
    store.append_reply(reply.id, "x", [1], TOKENIZER)
    assert [name for name, _ in seen] == ["normal", "commit"] * 2
    connection.set_trace_callback(None)


def test_the_files_as_they_lie_after_the_call_hold_the_turn(store: ChatStore, talk: Talk, tmp_path: Path) -> None:
    talk.exchange("the question", "the answer")
    copy = tmp_path / "copy"
    copy.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{store.file}{suffix}", copy / f"chats.db{suffix}")
    with ChatStore(copy / "chats.db") as again:
        assert [message.content for message in again.path(talk.chat.id)] == ["the question", "the answer"]


def test_files_are_for_the_owner_only(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    modes = {file.name: file.stat().st_mode & 0o777 for file in store.file.parent.iterdir()}
    assert set(modes) >= {"chats.db", "chats.db-wal", "chats.db-shm"}
    assert set(modes.values()) == {0o600}
    assert store.file.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(db_file: Path) -> None:
    ChatStore(db_file).close()
    db_file.chmod(0o644)
    old = os.umask(0)
    try:
        with ChatStore(db_file) as store:
            Talk(store, store.create_chat()).say("x")
            assert {file.stat().st_mode & 0o777 for file in db_file.parent.glob("chats.db*")} == {0o600}
    finally:
        os.umask(old)


def test_another_connection_reads_while_the_store_writes(store: ChatStore, talk: Talk) -> None:
    reader = sqlite3.connect(store.file)
    talk.exchange("a", "b")
    reader.execute("begin")
    assert reader.execute("select count(*) from messages").fetchone() == (2,)
    talk.exchange("c", "d")
    assert reader.execute("select count(*) from messages").fetchone() == (2,)
    reader.execute("commit")
    assert reader.execute("select count(*) from messages").fetchone() == (4,)
    reader.close()


def test_a_writer_that_holds_the_database_is_named_and_then_waited_out(store: ChatStore, talk: Talk) -> None:
    store._disk.sql.execute("pragma busy_timeout = 50")
    other = sqlite3.connect(store.file, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StoreBusyError, match="in use"):
        talk.say("x")
    assert talk.texts() == []
    other.execute("rollback")
    other.close()
    talk.say("x")
    assert talk.texts() == ["x"]


def test_one_store_at_a_time(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatkv.app.chats.opening.BUSY_TIMEOUT_S", 0.05)
    with pytest.raises(StoreBusyError, match="another chatkv"):
        ChatStore(store.file)
    store.close()
    ChatStore(store.file).close()


def test_a_clean_stop_leaves_one_file(db_file: Path) -> None:
    with ChatStore(db_file) as store:
        Talk(store, store.create_chat()).exchange("a", "b")
    assert {file.name for file in db_file.parent.iterdir()} == {"chats.db", "chats.db.lock"}
