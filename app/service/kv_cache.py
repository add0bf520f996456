"""What a person can do with the cache: forget a chat, clear, prune, verify, offload, pin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any, NamedTuple

from chatkv.app.chats.blocks import OwnedBlocks
from chatkv.app.chats.store import ChatStore
from chatkv.app.errors import UserError
from chatkv.engine.errors import EngineClosedError

from .chats_thread import ChatsThread
from .errors import ApiError
from .kv_store import STORE_ERRORS, KvStore
from .loaded import LoadedModel
from .model_choice import Installed
from .model_manager import ModelManager, ModelState
from .reuse import RequestLog
from .warming import Warmer

log = logging.getLogger(__name__)
FLUSH_TIMEOUT_S = 60.0
MAX_ROUNDS = 4
POLL_S = 0.02
_FAILED = object()


class Forgotten(NamedTuple):
    num_removed: int = 0
    num_shared: int = 0
    """Blocks that stay, because other chats need them."""
    is_complete: bool = True
    """False: something could not be removed from the disk yet; the log says what."""

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


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
        self.damaged: set[bytes] = set()
        """Names of the blocks that the last check found damaged, as far as the store tells."""

    async def forget(self, chat_id: str) -> Forgotten:
        """Remove a chat's blocks from device, tiers and queue, under every fingerprint; blocks that other chats own
        stay. The chat must not be at work."""
        await self._warmer.end(chat_id)
        self._requests.clear()
        num_removed, num_shared = 0, 0
        done: dict[bytes, frozenset[bytes]] = {}
        is_complete = True
        for _ in range(MAX_ROUNDS):  # A write that was under way may have brought rows since: then once more.
            owned = await self._chats.run(lambda store: store.owned_blocks(chat_id))
            fingerprints = set(owned) | ({self._models.loaded.fingerprint} if self._models.loaded else set())
            due = [name for name in fingerprints if name not in done or _rest(owned, name) - done[name]]
            if not due:
                break
            is_complete = True
            for fingerprint in due:
                step = await self._forget_in(chat_id, fingerprint, owned.get(fingerprint))
                num_shared = num_shared if fingerprint in done else num_shared + step.num_shared
                num_removed += step.num_removed
                is_complete = is_complete and step.is_complete
                if step.is_complete:
                    done[fingerprint] = _rest(owned, fingerprint)
        self._forget_answers()
        if is_complete:  # Else another try needs them.
            await self._chats.run(lambda store: store.drop_block_owners(chat_id))
        return Forgotten(num_removed, num_shared, is_complete)

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
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        is_left = False

        def on_progress(num_checked: int, num_blocks: int) -> None:
            loop.call_soon_threadsafe(told.put_nowait, (num_checked, num_blocks))

        work = asyncio.ensure_future(asyncio.to_thread(store.verify, on_progress, lambda: is_left))
        try:
            while not (work.done() and told.empty()):
                getting = asyncio.ensure_future(told.get())
                await asyncio.wait({work, getting}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    continue
                num_checked, num_blocks = getting.result()
                yield {"type": "progress", "num_checked": num_checked, "num_blocks": num_blocks}
            found = work.result()
            self.damaged = set(getattr(found, "damaged", ()))
            yield {"type": "done", "num_checked": found.num_checked, "num_damaged": found.num_damaged}
        finally:
            is_left = True

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

    async def _forget_in(self, chat_id: str, fingerprint: bytes, owned: OwnedBlocks | None) -> Forgotten:
        """Under one fingerprint, wherever its blocks are at this moment."""
        hashes, shared = (owned.owned, owned.shared) if owned is not None else (frozenset(), frozenset())
        await self._while_attaching(fingerprint)
        model = self._models.loaded
        if model is not None and model.fingerprint == fingerprint:
            result = await _on_engine(model, lambda engine: engine.forget(chat_id, hashes, shared))
            if result is not None:
                return Forgotten(result.num_removed, result.num_shared, await _flush(model))
            await self._while_attaching(fingerprint)
        found = await self._in_store(lambda store: store.forget_elsewhere(fingerprint, hashes, shared), default=_FAILED)
        if found is _FAILED:
            return Forgotten(is_complete=False)
        return Forgotten(*found) if found is not None else Forgotten()

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


def _rest(owned: dict[bytes, OwnedBlocks], fingerprint: bytes) -> frozenset[bytes]:
    found = owned.get(fingerprint)
    return found.owned if found is not None else frozenset()


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
