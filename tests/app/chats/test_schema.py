"""Upgrades: numbered, backed up, all or nothing; newer databases are left alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from chatkv.app.chats import salvage, schema
from chatkv.app.chats.database import ChatDatabase
from chatkv.app.chats.errors import NewerStoreError
from chatkv.app.chats.store import ChatStore

from .conftest import Talk


def _old_database(db_file: Path, version: int = 1) -> None:
    db_file.parent.mkdir(mode=0o700)
    db = ChatDatabase.on_disk(db_file, lambda: 5.0)
    schema.upgrade(db.sql, to=version)
    with db.write() as sql:
        sql.execute(
            "insert into chats(id, title, settings, tip_id, created_at, updated_at) "
            "values ('c1', 'old chat', '{}', 'm1', 1, 2)"
        )
        sql.execute(
            "insert into messages(id, chat_id, depth, role, content, status, created_at) "
            "values ('m1', 'c1', 1, 'user', 'an old needle', 'complete', 1)"
        )
    db.close()


def test_an_old_database_is_upgraded_and_backed_up(db_file: Path) -> None:
    _old_database(db_file)
    with ChatStore(db_file) as store:
        assert [message.content for message in store.path("c1")] == ["an old needle"]
        assert [hit.message_id for hit in store.search("needle")] == ["m1"]
        assert schema.version_of(store._disk.sql) == schema.VERSION
    (backup,) = schema.backups_of(db_file)
    assert backup.stat().st_mode & 0o777 == 0o600
    connection = sqlite3.connect(backup)
    assert connection.execute("pragma user_version").fetchone() == (1,)
    assert connection.execute("select content from messages").fetchall() == [("an old needle",)]
    connection.close()


def test_a_new_database_needs_no_backup(store: ChatStore) -> None:
    assert schema.backups_of(store.file) == []


def test_the_newest_three_backups_are_kept(db_file: Path) -> None:
    _old_database(db_file)
    db = ChatDatabase.on_disk(db_file, lambda: 5.0)
    for version in range(1, 6):
        schema.back_up(db.sql, db_file, version)
    db.close()
    assert sorted(file.name[-2:] for file in schema.backups_of(db_file)) == ["v3", "v4", "v5"]


def test_a_step_that_fails_changes_nothing(db_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _old_database(db_file)
    db = ChatDatabase.on_disk(db_file, lambda: 5.0)
    monkeypatch.setattr(schema, "STEPS", (schema.STEPS[0], "create table half (x); insert into nowhere values (1);"))
    with pytest.raises(sqlite3.OperationalError):
        schema.upgrade(db.sql)
    assert schema.version_of(db.sql) == 1
    assert "half" not in db.sql.table_names()
    db.close()
    monkeypatch.undo()
    with ChatStore(db_file) as store:
        assert store.search("needle")
        assert store.salvage_report is None


def test_a_newer_database_is_refused_and_untouched(db_file: Path) -> None:
    with ChatStore(db_file) as store:
        Talk(store, store.create_chat()).say("from the future")
    connection = sqlite3.connect(db_file)
    connection.execute(f"pragma user_version = {schema.VERSION + 1}")
    connection.execute("update meta set value = ? where key = 'schema_version'", [schema.VERSION + 1])
    connection.commit()
    connection.close()
    before = {file.name: file.read_bytes() for file in db_file.parent.iterdir()}
    with pytest.raises(NewerStoreError, match="newer chatkv"):
        ChatStore(db_file)
    assert {file.name: file.read_bytes() for file in db_file.parent.iterdir()} == before


@pytest.mark.parametrize(
    "statement",
    [
        "pragma user_version = 99",
        "pragma user_version = 0",
        "update meta set value = '99' where key = 'schema_version'",
        "update meta set value = '0' where key = 'schema_version'",
        "update meta set value = 'r' where key = 'schema_version'",
        "delete from meta",
    ],
)
def test_one_wrong_version_is_damage_and_not_another_program(db_file: Path, statement: str) -> None:
    with ChatStore(db_file) as store:
        talk = Talk(store, store.create_chat())
        talk.exchange("a", "b")
    connection = sqlite3.connect(db_file)
    connection.execute(statement)
    connection.commit()
    connection.close()
    with ChatStore(db_file) as store:
        assert [message.content for message in store.path(talk.chat.id)] == ["a", "b"]
        assert store.search("a")


def test_salvage_knows_every_table_by_its_number_of_columns(store: ChatStore) -> None:
    tables = {
        table: [name.strip() for name in columns.split(",")] for table, columns in schema.EXPECTED_COLUMNS.items()
    }
    for table in ("meta", "messages_fts", *schema.HINTS):
        tables.pop(table)
    assert {len(columns): (table, columns) for table, columns in tables.items()} == {
        number: (table, [column.name for column in columns]) for number, (table, columns) in salvage.SHAPES.items()
    }
    for table, columns in tables.items():
        assert list(store._disk.sql.table(table).columns_dict) == columns


def test_salvage_passes_over_the_tables_of_hints(store: ChatStore) -> None:
    """Their rows lie on index pages: none can be taken for a message, whatever their number of columns."""
    for table in schema.HINTS:
        (statement,) = store._disk.sql.execute("select sql from sqlite_master where name = ?", [table]).fetchone()
        assert "without rowid" in statement
        assert list(store._disk.sql.table(table).columns_dict) == schema.EXPECTED_COLUMNS[table].split(", ")
