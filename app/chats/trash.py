"""The trash: chats wait there before their text is removed for good."""

from __future__ import annotations

from collections.abc import Sequence

from . import blocks
from .database import ChatDatabase
from .errors import ChatNotFoundError

SECONDS_PER_DAY = 86_400


def trash(db: ChatDatabase, chat_id: str) -> None:
    _set_trashed(db, chat_id, db.now())


def restore(db: ChatDatabase, chat_id: str) -> None:
    _set_trashed(db, chat_id, None)


def purge_expired(db: ChatDatabase, days: float) -> list[str]:
    """Returns: the ids of the removed chats."""
    limit = db.now() - days * SECONDS_PER_DAY
    expired = [row["id"] for row in db.rows("select id from chats where trashed_at <= ?", [limit])]
    purge(db, expired)
    return expired


def purge(db: ChatDatabase, chat_ids: Sequence[str]) -> None:
    """Remove chats and their messages for good. Messages that a fork took over stay and now belong to the fork.

    The file is written anew after that, and also when an earlier purge did not come to it, as on a full disk."""
    if chat_ids:
        with db.write():
            for chat_id in chat_ids:
                _purge(db, chat_id)
            # Deleted words stay in the index's segments until these are merged.
            db.sql.execute("insert into messages_fts(messages_fts) values ('optimize')")
            db.note_traces()
    db.write_anew()


def _purge(db: ChatDatabase, chat_id: str) -> None:
    _give_to_forks(db, chat_id)
    db.sql.execute(
        "delete from damaged where row_id = :chat or row_id in (select id from messages where chat_id = :chat)",
        {"chat": chat_id},
    )
    blocks.drop_rows(db, chat_id)
    db.sql.execute("delete from messages where chat_id = ?", [chat_id])
    db.sql.execute("delete from chats where id = ?", [chat_id])


def _give_to_forks(db: ChatDatabase, chat_id: str) -> None:
    others = db.rows(
        "select id, forked_at_id from chats where id != ? and forked_at_id is not null order by created_at", [chat_id]
    )
    for other in others:
        db.sql.execute(
            "update messages set chat_id = :other where chat_id = :chat and id in ("
            "with recursive up(id) as (values(:at) union select m.parent_id from up join messages m on m.id = up.id "
            "where m.parent_id is not null) select id from up)",
            {"other": other["id"], "chat": chat_id, "at": other["forked_at_id"]},
        )


def _set_trashed(db: ChatDatabase, chat_id: str, at: float | None) -> None:
    with db.write():
        changed = db.sql.execute(
            "update chats set trashed_at = ? where id = ? and (trashed_at is null) = ?", [at, chat_id, at is not None]
        )
        if not changed.rowcount and not db.row("select 1 from chats where id = ?", [chat_id]):
            raise ChatNotFoundError(f"There is no chat {chat_id}.", "It may have been purged from the trash.")
