"""Whose blocks are whose: rows in the chat database, so that a chat can be forgotten, shown and pinned."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from chatkv.app.chats.errors import ChatStateError
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.engine.errors import OwnersGoneError

from .chats_thread import ChatsThread

log = logging.getLogger(__name__)
TIMEOUT_S = 5.0
OPEN_TIMEOUT_S = 60.0


class Owners:
    def __init__(self, chats: ChatsThread):
        self._chats = chats

    def on_owned(self, fingerprint: bytes, pairs: Sequence[tuple[str, bytes]]) -> None:
        """Called on the disk store's writer thread before blocks can be seen. What nobody could forget is not stored.

        Raises:
            OwnersGoneError: a chat was deleted meanwhile.
            UserError, TimeoutError: the database does not take the rows, or does not answer.
        """
        try:
            self._chats.call(lambda store: store.add_block_owners(fingerprint, pairs), TIMEOUT_S)
        except ChatStateError as error:
            raise OwnersGoneError(error.message) from error

    def pinned_in(self, fingerprint: bytes) -> set[bytes]:
        """Blocks of pinned chats. On a thread of the disk store."""
        by_chat = self._chats.call(lambda store: store.pinned_blocks(fingerprint), TIMEOUT_S)
        return {block_hash for hashes in by_chat.values() for block_hash in hashes}

    def owners_id(self) -> str:
        """Names the life of the rows. On a thread of the disk store; the database may just be opening."""
        return self._chats.call(lambda store: store.owners_id, OPEN_TIMEOUT_S)

    async def note(self, chat_id: str, fingerprint: bytes, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """The chain of a chat's newest request; the chat owns all of it, also what it found in the cache."""

        def write(store: ChatStore) -> None:
            store.add_block_owners(fingerprint, [(chat_id, block_hash) for block_hash in hashes])
            store.set_chain(chat_id, fingerprint, num_tokens, hashes)

        try:
            await self._chats.run(write)
        except UserError as error:
            log.warning("the owner of some blocks is not known: %s", error.message)

    async def share(
        self, chat_id: str, source_id: str, fingerprint: bytes, num_tokens: int, hashes: Sequence[bytes]
    ) -> None:
        """A fork owns what it needs of the blocks of the chat that it was made from; they are its chain."""

        def write(store: ChatStore) -> None:
            mine = store.owned_blocks(source_id).get(fingerprint)
            kept = [block_hash for block_hash in hashes if mine is not None and block_hash in mine.owned]
            if kept:
                store.add_block_owners(fingerprint, [(chat_id, block_hash) for block_hash in kept])
                store.set_chain(chat_id, fingerprint, num_tokens, hashes)

        try:
            await self._chats.run(write)
        except UserError as error:
            log.warning("a fork does not share its blocks: %s", error.message)
