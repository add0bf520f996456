"""Writing turns: the person's message, then the reply as it grows.

A reply that is being written has its text and ids in `reply_chunks`, one row a flush, so that a flush costs the same
however long the reply is. They are folded into the message when the reply ends, or when the store opens after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import chats, tree
from .database import ChatDatabase, clean_text
from .errors import ChatStateError
from .records import Message, MessageStatus, ReplyStats, Role
from .rows import dump_stats, pack_ids, unpack_ids

MAX_TITLE_CHARS = 60


def add_user_turn(
    db: ChatDatabase, chat_id: str, parent_id: str | None, content: str, token_ids: Sequence[int], tokenizer_hash: str
) -> Message:
    with db.write(is_durable=True):
        message_id = _add_user_message(db, chat_id, parent_id, content, len(token_ids))
        if token_ids:
            _store_ids(db, message_id, tokenizer_hash, pack_ids(token_ids))
    return get(db, message_id, chat_id)


def begin_turn(
    db: ChatDatabase, chat_id: str, parent_id: str | None, content: str, model: str | None
) -> tuple[Message, Message]:
    with db.write(is_durable=True):
        message_id = _add_user_message(db, chat_id, parent_id, content, 0)
        reply_id = _add_reply(db, chat_id, message_id, model)
    return get(db, message_id, chat_id), get(db, reply_id, chat_id)


def begin_reply(db: ChatDatabase, chat_id: str, parent_id: str | None, model: str | None) -> Message:
    with db.write():
        message_id = _add_reply(db, chat_id, parent_id, model)
    return get(db, message_id, chat_id)


def append_reply(
    db: ChatDatabase, message_id: str, text: str, token_ids: Sequence[int], tokenizer_hash: str | None
) -> None:
    if not text and not token_ids:
        return
    with db.write():
        _check_incomplete(db, message_id)
        db.sql.execute(
            "insert into reply_chunks(message_id, position, text, tokenizer_hash, ids) values (?, "
            "(select coalesce(max(position), 0) + 1 from reply_chunks where message_id = ?), ?, ?, ?)",
            [message_id, message_id, clean_text(text), tokenizer_hash, pack_ids(token_ids)],
        )


def finish_reply(
    db: ChatDatabase,
    message_id: str,
    status: MessageStatus,
    stats: ReplyStats | None,
    error: str | None,
    token_ids: Sequence[int] | None,
    tokenizer_hash: str | None,
) -> Message:
    if status is MessageStatus.INCOMPLETE:
        raise ValueError("a finished reply cannot be incomplete")
    with db.write():
        chat_id = _check_incomplete(db, message_id)["chat_id"]
        _fold(db, message_id, status, stats, error, token_ids, tokenizer_hash)
        db.sql.execute("update chats set updated_at = ? where id = ?", [db.now(), chat_id])
    return get(db, message_id, chat_id)


def reopen_reply(db: ChatDatabase, message_id: str, chat_id: str | None = None) -> Message:
    with db.write():
        row = tree.message_row(db, message_id)
        chat_id = chat_id or row["chat_id"]
        chats.open_row(db, chat_id)
        if row["role"] != Role.ASSISTANT:
            raise ChatStateError("Only a reply can be continued.", "Send a message instead.")
        if tree.children(db, chat_id, message_id):
            raise ChatStateError("The conversation went on after this reply.", "Regenerate it, or fork the chat there.")
        if _is_shared(db, row, chat_id):
            message_id = _copy_reply(db, message_id, chat_id)
            db.sql.execute("update chats set tip_id = ? where id = ?", [message_id, chat_id])
        db.sql.execute(
            "update messages set status = 'incomplete', error = null, content_hash = null where id = ?", [message_id]
        )
    return get(db, message_id, chat_id)


def set_token_ids(db: ChatDatabase, message_id: str, tokenizer_hash: str, token_ids: Sequence[int]) -> None:
    with db.write():
        tree.message_row(db, message_id)
        db.sql.execute(
            "delete from message_tokens where message_id = ? and tokenizer_hash = ?", [message_id, tokenizer_hash]
        )
        _store_ids(db, message_id, tokenizer_hash, pack_ids(token_ids))


def recover_incomplete(db: ChatDatabase) -> int:
    """Replies that were being written when the last process died become "stopped": their text and ids are kept.

    Returns: how many there were.
    """
    found = db.rows("select id from messages where status = 'incomplete'")
    if found:
        with db.write():
            for row in found:
                _fold(db, row["id"], MessageStatus.STOPPED, None, None, None, None)
    return len(found)


def get(db: ChatDatabase, message_id: str, chat_id: str | None = None, tokenizer_hash: str | None = None) -> Message:
    row = tree.message_row(db, message_id)
    return tree.messages(db, chat_id or row["chat_id"], [row], tokenizer_hash)[0]


def first_words(content: str) -> str:
    """A title: the first line that says something, cut between words."""
    line = " ".join(next((line for line in content.splitlines() if line.strip()), "").split())
    if len(line) <= MAX_TITLE_CHARS:
        return line
    head = line[: MAX_TITLE_CHARS - 1]
    return (head.rsplit(" ", 1)[0] if " " in head[MAX_TITLE_CHARS // 2 :] else head) + "…"


def _add_user_message(db: ChatDatabase, chat_id: str, parent_id: str | None, content: str, num_tokens: int) -> str:
    content = clean_text(content)
    chat = chats.open_row(db, chat_id)
    message_id = _insert(db, chat_id, parent_id, Role.USER, content, MessageStatus.COMPLETE, num_tokens=num_tokens)
    _store_hash(db, message_id)
    # A draft may have been saved while this text was still being typed.
    draft = chat["draft"]
    is_draft_sent = content.strip().startswith(draft.strip())
    db.sql.execute(
        "update chats set tip_id = ?, updated_at = ?, title = ?, draft = ? where id = ?",
        [message_id, db.now(), chat["title"] or first_words(content), "" if is_draft_sent else draft, chat_id],
    )
    return message_id


def _add_reply(db: ChatDatabase, chat_id: str, parent_id: str | None, model: str | None) -> str:
    chats.open_row(db, chat_id)
    message_id = _insert(db, chat_id, parent_id, Role.ASSISTANT, "", MessageStatus.INCOMPLETE, model=model)
    db.sql.execute("update chats set tip_id = ?, updated_at = ? where id = ?", [message_id, db.now(), chat_id])
    return message_id


def _insert(
    db: ChatDatabase,
    chat_id: str,
    parent_id: str | None,
    role: Role,
    content: str,
    status: MessageStatus,
    model: str | None = None,
    num_tokens: int = 0,
) -> str:
    parent: dict[str, Any] = {"depth": 0, "num_path_tokens": 0}
    if parent_id is not None:
        if not tree.is_in_chat(db, chat_id, parent_id):
            raise ChatStateError(f"Message {parent_id} is not in this chat.", "Open the chat again.")
        parent = db.row("select depth, num_path_tokens, status from messages where id = ?", [parent_id]) or parent
        if parent.get("status") == MessageStatus.INCOMPLETE:
            raise ChatStateError("The reply is still being written.", "Wait for its end, or stop it.")
    message_id = db.new_id()
    db.sql.table("messages").insert(
        {
            "id": message_id,
            "chat_id": chat_id,
            "parent_id": parent_id,
            "depth": parent["depth"] + 1,
            "role": role.value,
            "content": content,
            "status": status.value,
            "created_at": db.now(),
            "model": model,
            "num_tokens": num_tokens,
            "num_path_tokens": parent["num_path_tokens"] + num_tokens,
        }
    )
    return message_id


def _is_shared(db: ChatDatabase, row: dict[str, Any], chat_id: str) -> bool:
    """Whether another chat shows this message: what is written into it would appear there too."""
    if row["chat_id"] != chat_id or db.row("select 1 from messages where parent_id = ?", [row["id"]]):
        return True
    return bool(db.row("select 1 from chats where id <> ? and ? in (tip_id, forked_at_id)", [chat_id, row["id"]]))


def _copy_reply(db: ChatDatabase, message_id: str, chat_id: str) -> str:
    """Another version of an ended reply, in `chat_id`."""
    columns = "parent_id, depth, role, content, status, error, model, num_tokens, num_path_tokens, stats"
    copy_id = db.new_id()
    db.sql.execute(
        f"insert into messages(id, chat_id, created_at, {columns}) "
        f"select ?, ?, ?, {columns} from messages where id = ?",
        [copy_id, chat_id, db.now(), message_id],
    )
    db.sql.execute(
        "insert into message_tokens(message_id, tokenizer_hash, ids) "
        "select ?, tokenizer_hash, ids from message_tokens where message_id = ?",
        [copy_id, message_id],
    )
    return copy_id


def _fold(
    db: ChatDatabase,
    message_id: str,
    status: MessageStatus,
    stats: ReplyStats | None,
    error: str | None,
    token_ids: Sequence[int] | None,
    tokenizer_hash: str | None,
) -> None:
    """Chunks into the message. Ids are kept only if one tokenizer made them all."""
    text, chunk_ids = tree.chunks(db, message_id)
    stored = {
        row["tokenizer_hash"]: unpack_ids(row["ids"])
        for row in db.rows("select tokenizer_hash, ids from message_tokens where message_id = ?", [message_id])
    }
    row = tree.message_row(db, message_id)
    if token_ids is not None and tokenizer_hash is not None:
        ids_by_hash = {tokenizer_hash: tuple(token_ids)}
    else:
        names = set(chunk_ids) | (set(stored) if row["content"] else set())
        ids_by_hash = (
            {name: stored.get(name, ()) + chunk_ids.get(name, ()) for name in names} if len(names) == 1 else {}
        )
        if not chunk_ids and not text:
            ids_by_hash = stored
    num_tokens = max(map(len, ids_by_hash.values()), default=row["num_tokens"] + sum(map(len, chunk_ids.values())))
    changes = {
        "content": row["content"] + text,
        "status": status.value,
        "error": None if error is None else clean_text(error),
        "num_tokens": num_tokens,
        "num_path_tokens": _num_path_tokens(db, row["parent_id"], num_tokens, stats),
    }
    if stats is not None:
        changes["stats"] = dump_stats(stats)
    db.sql.execute(
        f"update messages set {', '.join(f'{name} = :{name}' for name in changes)} where id = :id",
        changes | {"id": message_id},
    )
    db.sql.execute("delete from reply_chunks where message_id = ?", [message_id])
    db.sql.execute("delete from message_tokens where message_id = ?", [message_id])
    for name, ids in ids_by_hash.items():
        _store_ids(db, message_id, name, pack_ids(ids))
    _store_hash(db, message_id)


def _num_path_tokens(db: ChatDatabase, parent_id: str | None, num_tokens: int, stats: ReplyStats | None) -> int:
    """What the engine counted (it includes the template's tokens), else the sum of what is known."""
    if stats and stats.num_prompt_tokens:
        return stats.num_prompt_tokens + stats.num_tokens
    parent = db.row("select num_path_tokens from messages where id = ?", [parent_id])
    return (parent["num_path_tokens"] if parent else 0) + num_tokens


def _store_ids(db: ChatDatabase, message_id: str, tokenizer_hash: str, ids: bytes) -> None:
    db.sql.execute(
        "insert into message_tokens(message_id, tokenizer_hash, ids) values (?, ?, ?)",
        [message_id, tokenizer_hash, ids],
    )


def _store_hash(db: ChatDatabase, message_id: str) -> None:
    row = tree.message_row(db, message_id)
    parent = db.row("select content_hash from messages where id = ?", [row["parent_id"]])
    own = tree.content_hash(parent["content_hash"] if parent else None, row["role"], row["content"])
    db.sql.execute("update messages set content_hash = ? where id = ?", [own, message_id])


def _check_incomplete(db: ChatDatabase, message_id: str) -> dict[str, Any]:
    row = tree.message_row(db, message_id)
    if row["status"] != MessageStatus.INCOMPLETE:
        raise ChatStateError("This reply is not being written.", "Continue it first.")
    return row
