"""Waking what waits on the event loop: cheaply, for it happens with every token."""

from __future__ import annotations

import asyncio
import threading


class Wakeup:
    """An event with one waiter, who may wait for a time only. On the event loop. A tenth of the cost of
    `asyncio.Event` and `asyncio.timeout` together."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[bool] | None = None

    def set(self) -> None:
        self._is_set = True
        _finish(self._waiter, True)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until the next `set`, or one since the last wait. False: the time has passed without it."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _finish, waiter, False) if timeout_s is not None else None
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        is_set, self._is_set = self._is_set, False
        return is_set


def _finish(waiter: asyncio.Future[bool] | None, is_set: bool) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(is_set)


class LoopWaker:
    """Sets wakeups of the running loop from other threads. Each call into a loop is a system call: those that come
    before the loop gets to it share one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._due: list[Wakeup] = []

    def wake(self, wakeup: Wakeup) -> None:
        """From any thread. Raises RuntimeError when the loop is closed."""
        with self._lock:
            self._due.append(wakeup)
            is_first = len(self._due) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._wake_due)

    def _wake_due(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for wakeup in due:
            wakeup.set()
