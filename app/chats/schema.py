"""The tables, as numbered upgrade steps, and the backup made before each upgrade.

Rules that salvage.py depends on:
- The tables that hold conversations are rowid tables with different numbers of columns, so that a row found on a
  loose page says by itself where it belongs. A step that adds a column adds its shape to `salvage.SHAPES`.
- Tables that hold hints (`HINTS`) are without rowid: their rows lie on pages of another kind, which a salvage passes
  over, so that none is taken for a message. They are empty afterwards.
- `meta` (key, value) holds `schema_version` for ever, written together with `user_version`: a flipped bit in the file's
  header can then be told from a database of a newer program.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from sqlite_utils import Database

NUM_BACKUPS = 3

_STEP_1 = """
create table meta (key text primary key, value text not null);
create table chats (
    id text primary key,
    title text not null,
    model text,
    settings text not null,
    draft text not null default '',
    is_pinned integer not null default 0,
    tip_id text references messages(id) deferrable initially deferred,
    context_start_id text,
    forked_at_id text references messages(id) deferrable initially deferred,
    created_at real not null,
    updated_at real not null,
    trashed_at real
);
create table messages (
    seq integer primary key autoincrement,
    id text not null unique,
    chat_id text not null references chats(id) deferrable initially deferred,
    parent_id text references messages(id) deferrable initially deferred,
    depth integer not null,
    role text not null,
    content text not null,
    status text not null,
    error text,
    created_at real not null,
    model text,
    num_tokens integer not null default 0,
    num_path_tokens integer not null default 0,
    stats text,
    content_hash blob
);
create table message_tokens (
    message_id text not null references messages(id) on delete cascade,
    tokenizer_hash text not null,
    ids blob not null
);
create table reply_chunks (
    message_id text not null references messages(id) on delete cascade,
    position integer not null,
    text text not null,
    tokenizer_hash text,
    ids blob not null
);
create table damaged (
    id integer primary key,
    table_name text not null,
    row_id text,
    column_name text,
    reason text not null,
    raw blob,
    found_at real not null
);
create index chats_by_tip on chats(tip_id);
create index chats_by_fork on chats(forked_at_id);
create index chats_by_time on chats(trashed_at, is_pinned desc, updated_at desc);
create index messages_by_parent on messages(parent_id);
create index messages_by_chat on messages(chat_id);
create index messages_by_hash on messages(content_hash);
create index messages_being_written on messages(status) where status = 'incomplete';
create unique index message_tokens_by_message on message_tokens(message_id, tokenizer_hash);
create unique index reply_chunks_by_message on reply_chunks(message_id, position);
"""

# The index holds no text of its own: it reads `messages`. It can be dropped and rebuilt at any time.
_STEP_2 = """
create virtual table messages_fts using fts5(
    content, content='messages', content_rowid='seq', tokenize='unicode61 remove_diacritics 2', prefix='2 3'
);
create trigger messages_fts_insert after insert on messages begin
    insert into messages_fts(rowid, content) values (new.seq, new.content);
end;
create trigger messages_fts_delete after delete on messages begin
    insert into messages_fts(messages_fts, rowid, content) values ('delete', old.seq, old.content);
end;
create trigger messages_fts_update after update of content on messages begin
    insert into messages_fts(messages_fts, rowid, content) values ('delete', old.seq, old.content);
    insert into messages_fts(rowid, content) values (new.seq, new.content);
end;
insert into messages_fts(messages_fts) values ('rebuild');
"""

# Which cached KV blocks (16-byte keyed hashes) belong to which chat, under every fingerprint that they were computed
# for, and the chain of each chat's last request. `owners_id` names this table's life: when the rows are lost, a new one
# tells the block store that it holds blocks whose owners nobody knows any more. The key's columns come first: where
# others stand before them in a table without rowids, SQLite 3.40's checks see NULLs, and the file passes for damaged.
_STEP_3 = """
create table block_owners (
    block_hash blob not null,
    chat_id text not null,
    fingerprint blob not null,
    primary key (block_hash, chat_id)
) without rowid;
create index block_owners_by_chat on block_owners(chat_id);
create table chat_chains (
    chat_id text not null,
    fingerprint blob not null,
    num_tokens integer not null,
    hashes blob not null,
    updated_at real not null,
    primary key (chat_id, fingerprint)
) without rowid;
insert or replace into meta(key, value) values ('owners_id', lower(hex(randomblob(12))));
"""

STEPS: tuple[str, ...] = (_STEP_1, _STEP_2, _STEP_3)
"""Step k takes a database from version k to version k + 1. A released step never changes."""

VERSION = len(STEPS)


EXPECTED_COLUMNS = {
    "meta": "key, value",
    "chats": "id, title, model, settings, draft, is_pinned, tip_id, context_start_id, forked_at_id, created_at, "
    "updated_at, trashed_at",
    "messages": "seq, id, chat_id, parent_id, depth, role, content, status, error, created_at, model, num_tokens, "
    "num_path_tokens, stats, content_hash",
    "message_tokens": "message_id, tokenizer_hash, ids",
    "reply_chunks": "message_id, position, text, tokenizer_hash, ids",
    "damaged": "id, table_name, row_id, column_name, reason, raw, found_at",
    "messages_fts": "content",
    "block_owners": "block_hash, chat_id, fingerprint",
    "chat_chains": "chat_id, fingerprint, num_tokens, hashes, updated_at",
}
HINTS = ("block_owners", "chat_chains")
"""Tables that a salvage leaves empty."""


def version_of(db: Database) -> int:
    """The schema's version: of the header's and the one in `meta` the higher that this program knows.

    One flipped bit can change either; a newer program raises both.
    """
    versions = _versions(db)
    return max((version for version in versions if version <= VERSION), default=min(versions))


def is_newer_file(path: Path) -> bool:
    """Looks at a file without opening it for writing or touching anything beside it."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return False
    if len(header) < 100 or int.from_bytes(header[60:64], "big", signed=True) <= VERSION:
        return False
    uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(uri, uri=True)
        try:
            return min(_versions(Database(connection, execute_plugins=False))) > VERSION
        finally:
            connection.close()
    except (sqlite3.Error, TypeError, ValueError):
        return False


def probe(db: Database) -> None:
    """
    Raises:
        sqlite3.OperationalError: a table or a column is missing.
    """
    for table, columns in EXPECTED_COLUMNS.items():
        db.execute(f"select {columns} from {table} limit 0")


def _versions(db: Database) -> list[int]:
    (header,) = db.execute("pragma user_version").fetchone()
    if "meta" not in db.table_names():
        return [header]
    row = db.execute("select value from meta where key = 'schema_version'").fetchone()
    return [header, int(row[0])] if row and re.fullmatch("[0-9]{1,9}", str(row[0])) else [header]


def upgrade(db: Database, make_backup: Callable[[int], object] | None = None, to: int = VERSION) -> None:
    """Bring `db` to version `to`, step by step, each in one transaction.

    Args:
        make_backup: called with the old version before the first step, unless the database is new.
    """
    if make_backup and 0 < (version := version_of(db)) < to:
        make_backup(version)
    while (version := version_of(db)) < to:
        with db.atomic():
            db.executescript(STEPS[version])
            db.execute(
                "insert or replace into meta(key, value) values ('schema_version', ?)",
                [str(version + 1)],
            )
            db.execute(f"pragma user_version = {version + 1}")
    (header,) = db.execute("pragma user_version").fetchone()
    if header != version:
        db.execute(f"pragma user_version = {version}")


def back_up(db: Database, path: Path, version: int) -> Path:
    """A whole copy of the database beside it, readable by the owner only; the newest three are kept.

    Raises:
        sqlite3.Error, OSError: no copy could be made; none is left half written.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    target = path.with_name(f"{path.name}.backup-{stamp}-v{version}")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        db.execute("vacuum into ?", [str(partial)])
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    backups = sorted(backups_of(path), key=lambda file: (file.stat().st_mtime_ns, file.name))
    for old in backups[:-NUM_BACKUPS]:
        old.unlink(missing_ok=True)
    return target


def backups_of(path: Path) -> list[Path]:
    return [file for file in path.parent.glob(f"{path.name}.backup-*") if not file.name.endswith(".partial")]
