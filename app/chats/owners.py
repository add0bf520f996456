"""The part of `ChatStore` that knows whose cached KV blocks are whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import blocks
from .blocks import ChatChain, OwnedBlocks
from .database import is_private_id
from .files import ChatFiles


class BlockOwners(ChatFiles):
    """Owners of blocks, chains and pins. Those of private chats are kept in memory only."""

    @property
    def owners_id(self) -> str:
        """Names the life of the owner rows. The block store keeps it; when it differs, the rows of some of its blocks
        were lost (a salvage, another database), and what cannot be forgotten chat by chat is to be cleared."""
        return self._run(False, blocks.owners_id)

    def add_block_owners(self, fingerprint: bytes, pairs: Sequence[tuple[str, bytes]]) -> None:
        """Commit (owner, block hash) rows with full synchronisation; known ones are passed over, as is the owner "".

        Raises:
            ChatStateError: a chat was deleted meanwhile: its blocks must not be stored any more. Nothing was written.
        """
        on_disk = [pair for pair in pairs if pair[0] and not is_private_id(pair[0])]
        in_memory = [pair for pair in pairs if is_private_id(pair[0])]
        if in_memory:
            self._run(True, lambda db: blocks.add_owners(db, fingerprint, in_memory))
        if on_disk:
            self._run(False, lambda db: blocks.add_owners(db, fingerprint, on_disk))

    def owned_blocks(self, chat_id: str) -> dict[bytes, OwnedBlocks]:
        """By fingerprint: the blocks of a chat, and which of them other chats own too.

        A private chat does not hold back blocks of others: what it needs is in memory.
        """
        found = self._run(is_private_id(chat_id), lambda db: blocks.owned(db, chat_id))
        if not is_private_id(chat_id):
            return found
        return {
            fingerprint: OwnedBlocks(mine.owned, mine.shared | self._owned_on_disk(mine.owned))
            for fingerprint, mine in found.items()
        }

    def drop_block_owners(self, chat_id: str) -> None:
        """Forget which blocks a chat owns, and its chains: nothing of them stays in the file."""
        self._run(is_private_id(chat_id), lambda db: blocks.drop(db, chat_id))

    def clear_block_owners(self) -> None:
        """The same for every chat, when all blocks are gone."""
        for in_memory in (True, False) if self._private else (False,):
            self._run(in_memory, blocks.clear)

    def set_chain(self, chat_id: str, fingerprint: bytes, num_tokens: int, hashes: Sequence[bytes]) -> None:
        """The full blocks of the chat's last request, in place of those known for this fingerprint."""
        self._run(is_private_id(chat_id), lambda db: blocks.set_chain(db, chat_id, fingerprint, num_tokens, hashes))

    def chains(self, fingerprint: bytes, limit: int = 1000) -> list[ChatChain]:
        """Newest first, private chats included."""
        found = self._run(False, lambda db: blocks.chains(db, fingerprint, limit))
        if self._private:
            found += self._run(True, lambda db: blocks.chains(db, fingerprint, limit))
            found.sort(key=lambda chain: -chain.updated_at)
        return found[:limit]

    def pinned_blocks(self, fingerprint: bytes) -> dict[str, list[bytes]]:
        """The blocks of each pinned chat that owns any."""
        return self._run(False, lambda db: blocks.of_pinned(db, fingerprint))

    def _owned_on_disk(self, hashes: Collection[bytes]) -> frozenset[bytes]:
        return self._run(False, lambda db: blocks.owned_by_any(db, hashes))
