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

    @property
    def notice(self) -> str | None:
        """What a person should know about the database since this service opened it."""
        if not self._store.done() or self._store.exception() is not None:
            return None
        report = self._store.result().salvage_report
        if report is None:
            return None
        kept = f"{report.num_chats} chats with {report.num_messages} messages were kept"
        lost = f"{report.num_lost} records could not be read, {report.num_set_aside} were set aside"
        file = f" The damaged file is {report.damaged_file}" if report.damaged_file else ""
        return f"The chat database was damaged: {kept}; {lost}.{file}"

    async def run(self, work: Callable[[ChatStore], T]) -> T:
        """Raises what `work` raises, or what kept the store from opening."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(self._store.result()))

    def call(self, work: Callable[[ChatStore], T], timeout_s: float) -> T:
        """The same from another thread, which waits.

        Raises:
            TimeoutError: `work` was not done in time; it may still be done later.
        """
        return self._pool.submit(lambda: work(self._store.result())).result(timeout_s)

    async def close(self) -> None:
        """Everything that was handed in is done first."""
        try:
            await self.run(lambda store: store.close())
        except Exception:
            log.exception("closing the chat database failed")
        self._pool.shutdown(wait=False)
