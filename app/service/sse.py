"""A server-sent stream: headers at once, events as they come, and a client that is gone ends the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .responses import SSE_HEADERS

T = TypeVar("T")


class EventStream(StreamingResponse):
    """Sends `events` (ready-made bytes, keep-alive comments among them), each yield in one write.

    `on_close` is called however it ends: at its end, by an error, or because the client's side of the socket closed,
    even before the first event. A slow reader makes `send` wait; whoever fills the generator bounds what piles up.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]):
        super().__init__(events, headers=SSE_HEADERS)
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await _first_done(self._pump(send), disconnected(receive)):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
            self._on_close()

    async def _pump(self, send: Send) -> bool:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        return True


async def disconnected(receive: Receive) -> None:
    """Returns when the client's side of the socket is closed. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, and `work` cancelled, when the client leaves first."""
    return await _first_done(work, disconnected(request.receive))


async def end_task(task: asyncio.Future[T]) -> None:
    """Cancel a task unless it is done, and wait for its clean-up; its result or error stays in it."""
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def _first_done(work: Coroutine[Any, Any, T], gone: Coroutine[Any, Any, None]) -> T | None:
    work_task, gone_task = asyncio.create_task(work), asyncio.create_task(gone)
    try:
        await asyncio.wait({work_task, gone_task}, return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        await end_task(gone_task)
        await end_task(work_task)
