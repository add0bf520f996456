"""`ChatStore`: every chat of a person, behind one synchronous interface for one database thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from . import chats, export, importing, search, trash, tree, turns
from .chats import UNSET, Unset
from .importing import ImportResult
from .owners import BlockOwners
from .records import Chat, ChatSettings, ChatSummary, Message, MessageStatus, ReplyStats, SearchHit


class ChatStore(BlockOwners):
    """The chats on disk and, beside them, the private ones, which live in memory and are gone on `close`.

    Every method may raise `StoreFullError` (nothing was written, the store stays usable), `StoreBusyError`, and
    `ChatNotFoundError` for an id that does not exist. Damage found on the way is salvaged and the call repeated.
    """

    # Chats

    def create_chat(
        self,
        title: str = "",
        model: str | None = None,
        settings: ChatSettings | None = None,
        is_private: bool = False,
    ) -> Chat:
        return self._run(is_private, lambda db: chats.create(db, title, model, settings or ChatSettings()))

    def get_chat(self, chat_id: str) -> Chat:
        return self._on(chat_id, lambda db: chats.get(db, chat_id))

    def list_chats(
        self, query: str = "", limit: int | None = None, offset: int = 0, in_trash: bool = False
    ) -> list[ChatSummary]:
        """Pinned ones first, then by the time of the last turn. `query` is looked for in titles and messages."""
        end = None if limit is None else offset + limit
        found = self._run(False, lambda db: chats.summaries(db, query, in_trash, end))
        if self._private:
            found += self._run(True, lambda db: chats.summaries(db, query, in_trash, end))
            found.sort(key=lambda chat: (not chat.is_pinned, -chat.updated_at))
        return found[offset:end]

    def update_chat(
        self,
        chat_id: str,
        *,
        title: str | Unset = UNSET,
        draft: str | Unset = UNSET,
        settings: ChatSettings | Unset = UNSET,
        is_pinned: bool | Unset = UNSET,
        model: str | Unset | None = UNSET,
        tip_id: str | Unset | None = UNSET,
        context_start_id: str | Unset | None = UNSET,
    ) -> Chat:
        """Change what is named, leave the rest. Ids must be of messages in this chat (`ChatStateError`)."""
        return self._on(
            chat_id,
            lambda db: chats.update(db, chat_id, title, draft, settings, is_pinned, model, tip_id, context_start_id),
        )

    def fork(self, chat_id: str, message_id: str) -> Chat:
        """A new chat that shares the rows up to `message_id`."""
        return self._on(chat_id, lambda db: chats.fork(db, chat_id, message_id))

    # Turns

    def add_user_turn(
        self,
        chat_id: str,
        parent_id: str | None,
        content: str,
        token_ids: Sequence[int] = (),
        tokenizer_hash: str = "",
    ) -> Message:
        """Commit the person's message with full synchronisation; it becomes the tip. `parent_id` None: a root.

        An untitled chat takes its title from the message; a draft that the message begins with is cleared.

        Raises:
            ChatStateError: the chat is in the trash, the parent is elsewhere or still being written.
        """
        return self._on(
            chat_id, lambda db: turns.add_user_turn(db, chat_id, parent_id, content, token_ids, tokenizer_hash)
        )

    def begin_turn(
        self, chat_id: str, parent_id: str | None, content: str, model: str | None
    ) -> tuple[Message, Message]:
        """`add_user_turn` and `begin_reply` in one commit: both, or neither."""
        return self._on(chat_id, lambda db: turns.begin_turn(db, chat_id, parent_id, content, model))

    def begin_reply(self, chat_id: str, parent_id: str | None, model: str | None) -> Message:
        """An empty reply, status "incomplete"; it becomes the tip."""
        return self._on(chat_id, lambda db: turns.begin_reply(db, chat_id, parent_id, model))

    def append_reply(
        self, message_id: str, text: str, token_ids: Sequence[int] = (), tokenizer_hash: str | None = None
    ) -> None:
        """Flush what came since the last flush. Text and ids need not match piece by piece.

        Raises:
            ChatStateError: the reply is not being written.
        """
        self._on(message_id, lambda db: turns.append_reply(db, message_id, text, token_ids, tokenizer_hash))

    def finish_reply(
        self,
        message_id: str,
        status: MessageStatus,
        stats: ReplyStats | None = None,
        error: str | None = None,
        token_ids: Sequence[int] | None = None,
        tokenizer_hash: str | None = None,
    ) -> Message:
        """End a reply. `token_ids` with `tokenizer_hash` replace the flushed ids (the part that the text shows).

        Without them the flushed ids are kept, if one tokenizer made them all.
        """
        return self._on(
            message_id,
            lambda db: turns.finish_reply(db, message_id, status, stats, error, token_ids, tokenizer_hash),
        )

    def reopen_reply(self, message_id: str, chat_id: str | None = None) -> Message:
        """Make an ended reply "incomplete" again, to be continued after its text and ids.

        One that another chat shows too (a fork shares rows) stays as it is: a copy of it is opened, the chat's new tip.
        `chat_id`: the chat that goes on (default: the one that the reply was written in).

        Raises:
            ChatStateError: it is no reply, or messages follow it.
        """
        return self._on(message_id, lambda db: turns.reopen_reply(db, message_id, chat_id))

    def get_message(self, message_id: str, chat_id: str | None = None, tokenizer_hash: str | None = None) -> Message:
        """Its text is whole at any time, also while it is being written; with its ids if a tokenizer is named."""
        return self._on(message_id, lambda db: turns.get(db, message_id, chat_id, tokenizer_hash))

    def set_token_ids(self, message_id: str, tokenizer_hash: str, token_ids: Sequence[int]) -> None:
        """Keep the exact ids of a message for one tokenizer, in place of those it had for it."""
        self._on(message_id, lambda db: turns.set_token_ids(db, message_id, tokenizer_hash, token_ids))

    # The tree

    def path(self, chat_id: str, tip_id: str | None = None, tokenizer_hash: str | None = None) -> list[Message]:
        """Root to tip (default: the chat's); with the ids of one tokenizer if it is named."""
        return self._on(
            chat_id, lambda db: tree.path(db, chat_id, tip_id or chats.get(db, chat_id).tip_id, tokenizer_hash)
        )

    def children(self, message_id: str, chat_id: str | None = None) -> list[str]:
        """Ids right below, oldest first, as seen in a chat (default: the one it was written in)."""
        return self._on(message_id, lambda db: tree.children(db, chat_id or tree.home_of(db, message_id), message_id))

    def siblings(self, message_id: str, chat_id: str | None = None) -> list[str]:
        """Ids of all versions of a message, itself included, oldest first, as seen in a chat."""
        return self._on(message_id, lambda db: tree.siblings(db, chat_id or tree.home_of(db, message_id), message_id))

    def siblings_on_path(self, chat_id: str, tip_id: str | None = None) -> dict[str, list[str]]:
        """For each message on the path that has other versions: all of them, itself included, oldest first."""
        return self._on(chat_id, lambda db: tree.versions_on_path(db, chat_id, tip_id or chats.get(db, chat_id).tip_id))

    def newest_leaf(self, chat_id: str, message_id: str) -> str:
        """The tip to show when a person switches to this version of a message."""
        return self._on(chat_id, lambda db: tree.newest_leaf(db, chat_id, message_id))

    # Finding, leaving, coming

    def search(self, query: str, limit: int = 50) -> list[SearchHit]:
        """Messages that match, best first, without those in the trash. Takes any text."""
        hits = self._run(True, lambda db: search.search(db, query, limit)) if self._private else []
        return hits + self._run(False, lambda db: search.search(db, query, limit - len(hits)))

    def trash(self, chat_id: str) -> Chat:
        self._on(chat_id, lambda db: trash.trash(db, chat_id))
        return self.get_chat(chat_id)

    def restore(self, chat_id: str) -> Chat:
        self._on(chat_id, lambda db: trash.restore(db, chat_id))
        return self.get_chat(chat_id)

    def purge_chat(self, chat_id: str) -> None:
        """Remove a chat for good, its text from the file too. Messages that forks share stay with them."""
        self._on(chat_id, lambda db: trash.purge(db, [chats.get(db, chat_id).id]))

    def purge_expired(self, days: float = 30) -> list[str]:
        """Remove what has been in the trash for `days`; returns the ids of the removed chats."""
        private = self._run(True, lambda db: trash.purge_expired(db, days)) if self._private else []
        return private + self._run(False, lambda db: trash.purge_expired(db, days))

    def export_chat(self, chat_id: str, format: Literal["json", "markdown"] = "json") -> str:
        """JSON: everything, all branches and ids. Markdown: the path to the tip, for people."""
        write = export.as_json if format == "json" else export.as_markdown
        return self._on(chat_id, lambda db: write(db, chat_id))

    def import_chat(self, text: str) -> ImportResult:
        """Take in an exported JSON. A chat whose messages are all here in one chat already is not taken twice.

        Raises:
            ImportRefusedError: the text is no export; nothing was written.
        """
        return self._run(False, lambda db: importing.import_json(db, text))
