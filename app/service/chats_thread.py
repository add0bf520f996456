"""The chat database's own thread: the store is opened, used and closed there, one call after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from chatkv.app.chats.store import ChatStore

T = TypeVar("T")
log = logging.getLogger(__name__)


class ChatsThread:
    """`await run(lambda store: store.get_chat(chat_id))` from the event loop, which never waits for the disk itself."""

    def __init__(self, path: Path):
        self._pool = ThreadPoolExecutor(1, "chats")
        self._store: Future[ChatStore] = self._pool.submit(ChatStore, path)

    async def run(self, work: Callable[[ChatStore], T]) -> T:
        """Raises what `work` raises, or what kept the store from opening."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(self._store.result()))

    async def close(self) -> None:
        """Everything that was handed in is done first."""
        try:
            await self.run(lambda store: store.close())
        except Exception:
            log.exception("closing the chat database failed")
        self._pool.shutdown(wait=False)
