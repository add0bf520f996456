"""A damaged database opens, loses only what is damaged, and says so."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.app.chats import salvage
from chatkv.app.chats.errors import ChatNotFoundError
from chatkv.app.chats.pages import PAGE_SIZE
from chatkv.app.chats.records import ChatSettings, MessageStatus, Role
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError

from .conftest import TOKENIZER, Talk

NUM_CHATS = 12
NUM_MESSAGES_A_CHAT = 8


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with long and short rows, closed cleanly."""
    file = tmp_path_factory.mktemp("healthy") / "chats.db"
    with ChatStore(file) as store:
        for number in range(NUM_CHATS):
            talk = Talk(store, store.create_chat(settings=ChatSettings(system="s" * 100)))
            for turn in range(NUM_MESSAGES_A_CHAT // 2):
                talk.exchange(f"question {number} {turn} ", f"answer {number} {turn} " * (700 if turn == 1 else 20))
    return file.read_bytes()


def _use(store: ChatStore) -> int:
    """Everything a person does first; returns how many whole messages are there."""
    num_messages = 0
    for chat in store.list_chats():
        store.get_chat(chat.id)
        store.siblings_on_path(chat.id)
        num_messages += sum(bool(message.content) for message in store.path(chat.id, tokenizer_hash=TOKENIZER))
    store.search("question")
    talk = Talk(store, store.create_chat())
    talk.exchange("new question", "new answer")
    assert talk.texts() == ["new question", "new answer"]
    return num_messages


def _flip_a_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _change_the_header(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(100)] = rng.randrange(256)


def _change_a_page_head(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data) // PAGE_SIZE) * PAGE_SIZE + rng.randrange(32)] = rng.randrange(256)


def _scramble_a_page(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) // PAGE_SIZE) * PAGE_SIZE
    data[at : at + PAGE_SIZE] = rng.randbytes(PAGE_SIZE)


def _zero_a_page(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) // PAGE_SIZE) * PAGE_SIZE
    data[at : at + PAGE_SIZE] = bytes(PAGE_SIZE)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


Damage = Callable[[bytearray, random.Random], None]
MOST_LOST = {
    _flip_a_bit: 12,
    _change_the_header: 0,
    _change_a_page_head: 60,
    _scramble_a_page: 60,
    _zero_a_page: 60,
    _cut: NUM_CHATS * NUM_MESSAGES_A_CHAT,
}
"""Messages that one hurt page can take along at most: as many as lie on it."""


@pytest.mark.parametrize("damage", MOST_LOST)
def test_any_damage_opens_and_the_rest_is_there(healthy: bytes, tmp_path: Path, damage: Damage) -> None:
    _check_damage(healthy, tmp_path, damage, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("damage", MOST_LOST)
def test_much_damage_opens_and_the_rest_is_there(healthy: bytes, tmp_path: Path, damage: Damage) -> None:
    _check_damage(healthy, tmp_path, damage, range(1000, 1150))


def _check_damage(healthy: bytes, tmp_path: Path, damage: Damage, seeds: range) -> None:
    for seed in seeds:
        file = tmp_path / str(seed) / "chats.db"
        file.parent.mkdir()
        data = bytearray(healthy)
        damage(data, random.Random(seed))
        file.write_bytes(data)
        with ChatStore(file) as store:
            num_messages = _use(store)
            report = store.salvage_report
        assert num_messages >= NUM_CHATS * NUM_MESSAGES_A_CHAT - MOST_LOST[damage], (seed, report)
        if report and report.damaged_file:
            assert Path(report.damaged_file).exists()
        with ChatStore(file) as store:
            assert store.salvage_report is None, seed


def test_the_damaged_file_is_kept_as_it_was(healthy: bytes, db_file: Path) -> None:
    db_file.parent.mkdir()
    data = bytearray(healthy)
    data[:16] = b"not a database!!"
    db_file.write_bytes(data)
    with ChatStore(db_file) as store:
        report = store.salvage_report
        assert report is not None
        assert report.damaged_file is not None
        assert report.num_chats == NUM_CHATS
        assert report.num_messages == NUM_CHATS * NUM_MESSAGES_A_CHAT
        assert (report.num_lost, report.num_set_aside) == (0, 0)
        assert Path(report.damaged_file).read_bytes() == data
        assert Path(report.damaged_file).stat().st_mode & 0o777 == 0o600
        assert _use(store) == report.num_messages
    assert json.dumps(report.to_json())


@pytest.mark.parametrize("data", [b"garbage" * 5000, bytes(10_000), b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_file_with_nothing_in_it_gives_an_empty_store(db_file: Path, data: bytes) -> None:
    db_file.parent.mkdir()
    db_file.write_bytes(data)
    with ChatStore(db_file) as store:
        assert store.salvage_report is not None
        assert _use(store) == 0


def test_a_page_that_breaks_while_the_store_is_open_is_salvaged_then(db_file: Path) -> None:
    with ChatStore(db_file) as store:
        talks = [Talk(store, store.create_chat(f"chat {number}")) for number in range(20)]
        for number, talk in enumerate(talks):
            talk.exchange(f"question {number}", "answer " * 100)
        reply = store.begin_reply(talks[0].chat.id, talks[0].say("go on").id, "m")
        store.append_reply(reply.id, "so far", [1], TOKENIZER)
        store._disk.checkpoint()
        rootpage = store._disk.sql.execute("select rootpage from sqlite_master where name = 'messages'").fetchone()[0]
        with db_file.open("r+b") as file:
            file.seek((rootpage - 1) * PAGE_SIZE)
            file.write(b"\xff" * 64)
        # A cached copy of the page would hide the damage.
        store._disk.sql.execute("pragma shrink_memory")
        assert [talk.texts()[0] for talk in talks] == [f"question {number}" for number in range(20)]
        assert store.salvage_report is not None
        store.append_reply(reply.id, " and on", [2], TOKENIZER)
        assert store.finish_reply(reply.id, MessageStatus.COMPLETE).content == "so far and on"


def test_rows_in_the_wal_are_salvaged_too(db_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "chats.db"
    copy.parent.mkdir()
    with ChatStore(db_file) as store:
        store._disk.checkpoint()
        talk = Talk(store, store.create_chat())
        talk.exchange("only in the wal", "answer " * 2000)
        copy.with_name("chats.db-wal").write_bytes(db_file.with_name("chats.db-wal").read_bytes())
        copy.write_bytes(bytes(db_file.stat().st_size))
    with ChatStore(copy) as store:
        assert Talk(store, talk.chat).texts() == ["only in the wal", "answer " * 2000]
        assert store.salvage_report is not None


def test_an_emptied_file_beside_its_wal_is_not_taken_for_a_new_one(db_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "chats.db"
    copy.parent.mkdir()
    with ChatStore(db_file) as store:
        talk = Talk(store, store.create_chat())
        talk.exchange("a", "b")
        copy.with_name("chats.db-wal").write_bytes(db_file.with_name("chats.db-wal").read_bytes())
        copy.write_bytes(b"")
    with ChatStore(copy) as store:
        assert Talk(store, talk.chat).texts() == ["a", "b"]


def test_a_crash_between_rebuilding_and_swapping_is_finished_later(healthy: bytes, db_file: Path) -> None:
    db_file.parent.mkdir()
    db_file.write_bytes(b"the damaged one")
    db_file.with_name("chats.db.rebuilt").write_bytes(healthy)
    with ChatStore(db_file) as store:
        assert _use(store) == NUM_CHATS * NUM_MESSAGES_A_CHAT
    (kept,) = db_file.parent.glob("chats.db.damaged-*")
    assert kept.read_bytes() == b"the damaged one"


def test_a_salvage_that_cannot_write_leaves_the_file_alone(
    healthy: bytes, db_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db_file.parent.mkdir()
    data = b"broken" + healthy[6:]
    db_file.write_bytes(data)

    def no_space(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(salvage, "_copy_rows", no_space)
    with pytest.raises(Exception, match="no space left"):
        ChatStore(db_file)
    assert {file.name for file in db_file.parent.iterdir()} == {"chats.db", "chats.db.lock"}
    assert db_file.read_bytes() == data
    monkeypatch.undo()
    with ChatStore(db_file) as store:
        assert _use(store) == NUM_CHATS * NUM_MESSAGES_A_CHAT


def test_a_chat_that_its_index_forgot_is_found_again(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    sql = store._disk.sql
    page_of = dict(sql.execute("select name, rootpage from sqlite_master where type = 'index'").fetchall())
    store._disk.checkpoint()
    with store.file.open("r+b") as file:
        file.seek((page_of["sqlite_autoindex_chats_1"] - 1) * PAGE_SIZE + 3)
        file.write(bytes(2))  # The page holds no cells.
    sql.execute("pragma shrink_memory")
    assert store.get_chat(talk.chat.id).title == "a"
    assert talk.texts() == ["a", "b"]


def test_a_tip_that_never_was_is_not_found(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    for _ in range(2):
        with pytest.raises(ChatNotFoundError):
            store.path(talk.chat.id, "f" * 24)
    assert store.salvage_report is None


def test_a_hole_in_the_way_is_mended_when_it_is_met(store: ChatStore, talk: Talk) -> None:
    """The file was closed cleanly, so that opening looked at no rows."""
    talk.exchange("a", "b")
    third, _ = talk.exchange("c", "d")
    store._disk.sql.execute("pragma foreign_keys = off")
    store._disk.sql.execute("delete from messages where content = 'b'")
    assert talk.texts() == ["c", "d"]
    assert store.salvage_report is not None
    assert (store.salvage_report.num_lost, store.salvage_report.damaged_file) == (1, None)
    assert store.siblings(third.id)[-1] == third.id
    assert store.list_chats()[0].num_messages == 2


# Single rows


def _damaged(store: ChatStore) -> list[tuple[str, str, bytes]]:
    return store._disk.sql.execute("select table_name, column_name, raw from damaged order by id").fetchall()


@pytest.mark.parametrize(
    "settings", ["{", "[1]", '{"system": 5}', '{"sampling": {"top_k": "x"}}', "[" * 50_000, b"\xff{"]
)
def test_jan882_unreadable_settings_hide_no_chat(store: ChatStore, talk: Talk, settings: str | bytes) -> None:
    talk.exchange("a", "b")
    store._disk.sql.execute("update chats set settings = ?", [settings])
    assert store.get_chat(talk.chat.id).settings == ChatSettings()
    assert talk.texts() == ["a", "b"]
    raw = settings.encode() if isinstance(settings, str) else settings
    assert _damaged(store) in ([("chats", "settings", raw)], [("chats", "settings", "�{".encode())])
    store.get_chat(talk.chat.id)
    assert store.num_set_aside == 1


def test_jan882_senseless_values_hide_no_message(store: ChatStore, talk: Talk) -> None:
    question, reply = talk.exchange("a", "b")
    store._disk.sql.execute("update messages set role = 'king', status = 'odd', stats = '{' where id = ?", [reply.id])
    store._disk.sql.execute(
        "update messages set content = cast(x'61ff62' as text), num_tokens = 'x' where id = ?", [question.id]
    )
    first, second = store.path(talk.chat.id)
    assert (first.content, first.num_tokens) == ("a�b", 0)
    assert (second.role, second.status, second.stats) == (Role.ASSISTANT, MessageStatus.STOPPED, None)
    assert store.num_set_aside == 3


def _reopened_after_a_kill(store: ChatStore) -> ChatStore:
    """As a store finds its file after the process died: not marked as closed."""
    store._disk.sql.execute("pragma foreign_keys = off")
    store.close()
    connection = sqlite3.connect(store.file)
    connection.execute("update meta set value = '1' where key = 'is_open'")
    connection.commit()
    connection.close()
    return ChatStore(store.file)


def test_after_an_unclean_stop_every_contradiction_is_mended(store: ChatStore, talk: Talk) -> None:
    texts = ["a", "b", "c", "d"]
    talk.exchange("a", "b")
    talk.exchange("c", "d")
    ring, orphan, homeless = (Talk(store, store.create_chat(f"chat {number}")) for number in range(3))
    for other in (ring, orphan, homeless):
        for number in range(3):
            other.exchange(f"q{number}", f"r{number}")
    sql = store._disk.sql
    sql.execute("pragma foreign_keys = off")
    ring_ids = [message.id for message in store.path(ring.chat.id)]
    sql.execute("update messages set parent_id = ? where id = ?", [ring_ids[2], ring_ids[0]])
    orphan_ids = [message.id for message in store.path(orphan.chat.id)]
    sql.execute("delete from messages where id = ?", [orphan_ids[1]])
    sql.execute("delete from chats where id = ?", [homeless.chat.id])
    sql.execute("update messages set depth = 77 where content = 'c'")
    sql.execute("update messages set content = cast(x'62ff' as text) where content = 'b'")
    sql.execute("update chats set tip_id = 'nowhere' where id = ?", [ring.chat.id])
    with _reopened_after_a_kill(store) as again:
        report = again.salvage_report
        assert report is not None
        assert report.damaged_file is None
        assert report.num_lost == 2
        assert report.num_set_aside == again.num_set_aside > 0
        path = again.path(talk.chat.id)
        assert [message.content for message in path] == ["a", "b�", *texts[2:]]
        by_title = {chat.title: chat for chat in again.list_chats()}
        assert set(by_title) == {"a", "chat 0", "chat 1", "q0"}
        rows = {title: [message.content for message in again.path(chat.id)] for title, chat in by_title.items()}
        assert rows["chat 0"] == ["q0", "r0", "q1", "r1", "q2", "r2"]
        assert rows["chat 1"] == ["q1", "r1", "q2", "r2"]
        assert rows["q0"] == ["q0", "r0", "q1", "r1", "q2", "r2"]
        assert by_title["q0"].id == homeless.chat.id
        assert {title: chat.num_messages for title, chat in by_title.items()} == {
            "a": 4,
            "chat 0": 6,
            "chat 1": 4,
            "q0": 6,
        }
        again._disk.sql.execute("pragma foreign_keys = on")
        assert again._disk.sql.execute("pragma foreign_key_check").fetchall() == []
        again.add_user_turn(homeless.chat.id, None, "on")


def test_an_unclean_stop_without_damage_reports_none(store: ChatStore, talk: Talk) -> None:
    talk.exchange("a", "b")
    with _reopened_after_a_kill(store) as again:
        assert again.salvage_report is None
        assert again.num_set_aside == 0
        assert Talk(again, talk.chat).texts() == ["a", "b"]


def test_after_an_unclean_stop_the_owners_of_blocks_are_known_still(store: ChatStore, talk: Talk) -> None:
    """B5: SQLite's own check took a table whose key columns do not come first for damaged, after every kill."""
    talk.exchange("a", "b")
    hashes = [bytes([number]) * 16 for number in range(5)]
    store.add_block_owners(b"f" * 32, [(talk.chat.id, name) for name in hashes])
    store.set_chain(talk.chat.id, b"f" * 32, 80, hashes)
    owners_id = store.owners_id
    with _reopened_after_a_kill(store) as again:
        assert again.salvage_report is None
        assert again.owners_id == owners_id
        assert again.owned_blocks(talk.chat.id)[b"f" * 32].owned == frozenset(hashes)
        assert again._disk.sql.execute("pragma integrity_check").fetchall() == [("ok",)]


def test_a_folder_in_the_files_place_is_said_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    (file / "something").mkdir(parents=True)
    with pytest.raises(UserError, match="is a folder"):
        ChatStore(file)
    assert (file / "something").is_dir()
