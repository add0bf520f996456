"""Reading every stored block, and telling how far it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from .store_port import STORE_ERRORS, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckProgress:
    num_checked: int
    num_blocks: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "progress", "num_checked": self.num_checked, "num_blocks": self.num_blocks}


@dataclass(frozen=True, slots=True)
class Checked:
    """The end."""

    num_checked: int
    num_damaged: int
    damaged: frozenset[bytes]
    """Names of the damaged blocks."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "done", "num_checked": self.num_checked, "num_damaged": self.num_damaged}


@dataclass(frozen=True, slots=True)
class CheckFailed:
    """The end as well: the disk does not let itself be read."""

    message: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "error", "message": self.message}


async def check_store(store: Store) -> AsyncGenerator[CheckProgress | Checked | CheckFailed, None]:
    """Closing it ends the check."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[CheckProgress | None] = asyncio.Queue()
    is_left = False

    def put(progress: CheckProgress | None) -> None:
        loop.call_soon_threadsafe(told.put_nowait, progress)

    def check() -> Any:
        try:
            return store.verify(lambda checked, total: put(CheckProgress(checked, total)), lambda: is_left)
        finally:
            put(None)

    work = asyncio.ensure_future(asyncio.to_thread(check))
    try:
        while (progress := await told.get()) is not None:
            yield progress
        found = await work
        yield Checked(found.num_checked, found.num_damaged, found.damaged)
    except STORE_ERRORS as error:
        log.warning("checking the disk store failed: %s", error)
        yield CheckFailed(f"The store cannot be read to its end: {error}")
    finally:
        is_left = True
