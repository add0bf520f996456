"""What a person can do with the cache: forget a chat, clear, prune, verify, offload, pin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any

from chatkv.app.chats.blocks import OwnedBlocks
from chatkv.app.chats.database import is_private_id
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.engine.errors import EngineClosedError

from .chats_thread import ChatsThread
from .errors import ApiError
from .forgotten import Forgotten
from .kv_store import KvStore
from .loaded import LoadedModel
from .model_choice import Installed
from .model_manager import ModelManager
from .model_state import ModelState
from .reuse import RequestLog
from .store_check import Checked, check_store
from .store_port import STORE_ERRORS
from .warming import Warmer

log = logging.getLogger(__name__)
FLUSH_TIMEOUT_S = 60.0
MAX_ROUNDS = 4
POLL_S = 0.02
_FAILED = object()
_NO_BLOCKS = OwnedBlocks(frozenset(), frozenset())


class KvCache:
    """Every answer comes when nothing is left in any file. Lives on the event loop."""

    def __init__(
        self,
        kv_store: KvStore,
        chats: ChatsThread,
        models: ModelManager,
        installed: Installed,
        warmer: Warmer,
        requests: RequestLog,
    ):
        self._kv_store = kv_store
        self._chats = chats
        self._models = models
        self._installed = installed
        self._warmer = warmer
        self._requests = requests
        self.damaged: frozenset[bytes] = frozenset()
        """Names of the blocks that the last check found damaged, as far as the store tells."""
        self._removing = asyncio.Lock()
        """One at a time: two chats that are forgotten at once would each leave what they share to the other."""

    async def forget(self, chat_id: str) -> Forgotten:
        """Remove a chat's blocks from device, tiers and queue, under every fingerprint; blocks that other chats own
        stay. The chat must not be at work."""
        async with self._removing:
            return await self._forget(chat_id)

    async def _forget(self, chat_id: str) -> Forgotten:
        await self._warmer.end(chat_id)
        self._requests.clear()
        done: dict[bytes, frozenset[bytes]] = {}
        total = Forgotten()
        for _ in range(MAX_ROUNDS):  # A write that was under way may have brought rows since: then once more.
            due = await self._due(chat_id, done, is_last=total.is_complete)
            if not due:
                break
            for fingerprint, blocks in due.items():
                step = await self._forget_in(chat_id, fingerprint, blocks)
                done[fingerprint] = done.get(fingerprint, frozenset()) | blocks.owned
                total += step
            if any(blocks.owned for blocks in due.values()) and not is_private_id(chat_id):
                total += Forgotten(is_complete=await self._scrub())
        else:
            total += Forgotten(is_complete=False)
        self._forget_answers()
        return total

    async def forget_trashed(self) -> None:
        """Chats that were deleted when the service ended in the middle of it."""

        def find(store: ChatStore) -> list[str]:
            return [chat.id for chat in store.list_chats(in_trash=True) if store.owned_blocks(chat.id)]

        try:
            for chat_id in await self._chats.run(find):
                await self.forget(chat_id)
        except UserError as error:
            log.warning("deleted chats are not forgotten: %s", error.message)

    async def clear(self) -> Forgotten:
        """Remove everything of everybody."""
        async with self._removing:
            return await self._clear()

    async def _clear(self) -> Forgotten:
        num_removed = 0
        self._requests.clear()
        await self._while_attaching(None)
        model = self._models.loaded
        if model is not None:
            dropped = await _on_engine(model, lambda engine: engine.drop_all())
            num_removed += dropped.num_removed if dropped is not None else 0
            await _flush(model)
        num_stored = await self._in_store(lambda store: store.clear(), default=_FAILED)
        is_complete = num_stored is not _FAILED and (model is None or await _flush(model))
        is_complete = is_complete and not await self._is_store_out_of_reach()
        if is_complete:
            await self._chats.run(lambda store: store.clear_block_owners())
            num_removed += num_stored or 0
        self._forget_answers()
        return Forgotten(num_removed, 0, is_complete)

    async def prune(self) -> dict[str, Any]:
        """Remove what no installed model can use.

        Raises:
            ApiError: 409 there is no store on disk.
        """
        installed = {model.content_sha256 for model in self._installed.list()}
        result = await self._in_store(lambda store: store.prune(installed))
        if result is None:
            raise self._no_store()
        return {
            "num_slabs": result.num_slabs,
            "num_blocks": result.num_blocks,
            "freed_bytes": result.freed_bytes,
        }

    async def offload(self, chat_id: str) -> int:
        """Free the device of what a lower tier holds too; the number of blocks."""
        model = self._models.loaded
        if model is None:
            return 0
        await self._warmer.end(chat_id)
        fingerprint = model.fingerprint
        owned = (await self._chats.run(lambda store: store.owned_blocks(chat_id))).get(fingerprint)
        if owned is None:
            return 0
        return await _on_engine(model, lambda engine: engine.offload(owned.owned - owned.shared)) or 0

    async def verify(self) -> AsyncGenerator[dict[str, Any], None]:
        """Progress, and what was found at last. Closing it ends the check.

        Raises:
            ApiError: 409 there is no store on disk.
        """
        store = await asyncio.to_thread(self._kv_store.wait)
        if store is None:
            raise self._no_store()
        async with aclosing(check_store(store)) as events:
            async for event in events:
                if isinstance(event, Checked):
                    self.damaged = event.damaged
                yield event.to_json()

    async def set_pinned(self, chat_id: str, is_pinned: bool) -> None:
        """For the blocks that are stored, and the chat's later ones."""
        model = self._models.loaded
        if model is None:
            return
        owned = (await self._chats.run(lambda store: store.owned_blocks(chat_id))).get(model.fingerprint)
        hashes = owned.owned if owned is not None else frozenset()
        await _on_engine(model, lambda engine: engine.set_pinned(chat_id, hashes, is_pinned))

    async def pin_all(self, model: LoadedModel) -> None:
        """A model was loaded: its engine hears of the pinned chats."""
        try:
            pinned = await self._chats.run(lambda store: store.pinned_blocks(model.fingerprint))
        except UserError as error:
            log.warning("pinned chats are not known: %s", error.message)
            return
        for chat_id, hashes in pinned.items():
            await _on_engine(model, _pinning(chat_id, hashes))

    async def _due(
        self, chat_id: str, done: Mapping[bytes, frozenset[bytes]], is_last: bool
    ) -> dict[bytes, OwnedBlocks]:
        """What is to be forgotten yet, by fingerprint. When that is nothing and all went well, the chat's rows go in
        the same call, so that no block is stored between the two; else another try needs them."""
        loaded = {self._models.loaded.fingerprint} if self._models.loaded else set()

        def find(store: ChatStore) -> dict[bytes, OwnedBlocks]:
            owned = store.owned_blocks(chat_id)
            due = {name: _without(blocks, done.get(name, frozenset())) for name, blocks in owned.items()}
            due = {name: blocks for name, blocks in due.items() if blocks.owned or name not in done}
            due |= dict.fromkeys(loaded - due.keys() - done.keys(), _NO_BLOCKS)
            if not due and is_last:
                store.drop_block_owners(chat_id)
            return due

        return await self._chats.run(find)

    async def _forget_in(
        self, chat_id: str, fingerprint: bytes, blocks: OwnedBlocks, is_again: bool = False
    ) -> Forgotten:
        """Under one fingerprint, wherever its blocks are at this moment."""
        await self._while_attaching(fingerprint)
        model, forgotten = self._models.loaded, Forgotten()
        if model is not None and model.fingerprint == fingerprint:
            result = await _on_engine(model, lambda engine: engine.forget(chat_id, blocks.owned, blocks.shared))
            if result is not None:
                forgotten = Forgotten(result.num_removed, result.num_shared, await _flush(model))
                if model.has_disk_tier or is_private_id(chat_id):
                    return forgotten
            await self._while_attaching(fingerprint)
        stored = await self._forget_stored(fingerprint, blocks)
        if stored.is_complete or is_again:
            return forgotten + stored
        # While this waited for the store to open, a model may have waited too, and have the blocks now.
        return forgotten + await self._forget_in(chat_id, fingerprint, blocks, is_again=True)

    async def _forget_stored(self, fingerprint: bytes, blocks: OwnedBlocks) -> Forgotten:
        """On the disk alone, when no engine has a tier open on it."""
        found = await self._in_store(
            lambda store: store.forget_elsewhere(fingerprint, blocks.owned, blocks.shared), default=_FAILED
        )
        if found is _FAILED:
            return Forgotten(is_complete=False)
        if found is not None:
            return Forgotten(*found)
        return Forgotten(is_complete=not (blocks.owned and await self._is_store_out_of_reach()))

    async def _scrub(self) -> bool:
        """Blocks that were evicted before are known to no tier, and their bytes are still there."""
        return await self._in_store(lambda store: store.scrub(), default=_FAILED) is not _FAILED

    async def _is_store_out_of_reach(self) -> bool:
        return await asyncio.to_thread(self._kv_store.is_out_of_reach)

    async def _while_attaching(self, fingerprint: bytes | None) -> None:
        """A tier that is open belongs to an engine, which may be a moment away; or is about to be closed."""
        while self._models.is_unloading or self._is_attaching(fingerprint):
            await asyncio.sleep(POLL_S)

    def _is_attaching(self, fingerprint: bytes | None) -> bool:
        attaching = self._kv_store.attaching
        is_meant = attaching is not None and fingerprint in (None, attaching)
        return is_meant and self._models.state is ModelState.LOADING

    async def _in_store(self, work: Callable[[Any], Any], default: Any = None) -> Any:
        """In a thread, once the store is open; None when there is none, `default` when it fails."""
        store = await asyncio.to_thread(self._kv_store.wait)
        if store is None:
            return None
        try:
            return await asyncio.to_thread(work, store)
        except STORE_ERRORS as error:
            log.warning("the disk store failed: %s", error)
            return default

    def _forget_answers(self) -> None:
        if (model := self._models.loaded) is not None:
            model.text.forget_answers()

    def _no_store(self) -> ApiError:
        notice = self._kv_store.notice or "The disk keeps nothing (setting: kv_disk_bytes)."
        return ApiError(409, notice, "no_kv_store")


def _without(blocks: OwnedBlocks, done: frozenset[bytes]) -> OwnedBlocks:
    return OwnedBlocks(blocks.owned - done, blocks.shared - done)


def _pinning(chat_id: str, hashes: Collection[bytes]) -> Callable[[Any], None]:
    return lambda engine: engine.set_pinned(chat_id, hashes, True)


async def _on_engine(model: LoadedModel, work: Callable[[Any], Any]) -> Any:
    """On the engine's thread, between steps; None when the model is being unloaded: its tiers are closed then."""
    try:
        return await asyncio.wrap_future(model.engine.run(work))
    except EngineClosedError:
        return None


async def _flush(model: LoadedModel) -> bool:
    is_flushed = await asyncio.to_thread(model.flush, FLUSH_TIMEOUT_S)
    if not is_flushed:
        log.warning("the disk has not removed everything after %.0f s", FLUSH_TIMEOUT_S)
    return is_flushed
