"""What happens in the service, told to every subscriber in one order, each event with its number."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from .responses import KEEP_ALIVE, sse_event

MAX_BEHIND = 4096
"""Events that a subscriber may be behind. One that falls further is told to fetch everything again, and let go."""


class EventHub:
    """Lives on the event loop. Publishing never waits for anybody."""

    def __init__(self) -> None:
        self.seq = 0
        """Number of the newest event. What was read when `seq` was n already holds the events up to n."""
        self._subscribers: set[_Subscriber] = set()

    @property
    def num_subscribers(self) -> int:
        return len(self._subscribers)

    def publish(self, kind: str, **fields: Any) -> None:
        self.seq += 1
        event = {"seq": self.seq, "type": kind, **fields}
        data = sse_event(event)
        for subscriber in self._subscribers:
            subscriber.put(event, data)

    def close(self) -> None:
        """Every subscriber gets what it has not read yet, and the end."""
        for subscriber in self._subscribers:
            subscriber.end()

    async def stream(
        self, first: dict[str, Any], keep_alive_s: float, message_id: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events from now on, `first` before them; of one reply only, up to its end, with `message_id`."""
        subscriber = _Subscriber(message_id)
        self._subscribers.add(subscriber)
        try:
            yield sse_event({"seq": self.seq, **first})
            while True:
                data = await subscriber.next(keep_alive_s)
                if data is None:
                    return
                yield data
                if subscriber.is_lagging:
                    yield sse_event({"seq": self.seq, "type": "resync"})
                    return
        finally:
            self._subscribers.discard(subscriber)


class _Subscriber:
    def __init__(self, message_id: str | None):
        self.message_id = message_id
        self.is_lagging = False
        self._is_ended = False
        self._waiting: deque[bytes] = deque()
        self._wakeup = asyncio.Event()

    def put(self, event: dict[str, Any], data: bytes) -> None:
        if self._is_ended or (self.message_id is not None and _message_of(event) != self.message_id):
            return
        if len(self._waiting) >= MAX_BEHIND:
            self.is_lagging = True
            self._waiting.clear()
            self.end()
            return
        self._waiting.append(data)
        if self.message_id is not None and event["type"] == "reply_done":
            self._is_ended = True
        self._wakeup.set()

    def end(self) -> None:
        self._is_ended = True
        self._wakeup.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The next event, a keep-alive comment after `timeout_s` without one, None at the end."""
        while not self._waiting:
            if self._is_ended:
                return None if not self.is_lagging else b""
            self._wakeup.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wakeup.wait()
            except TimeoutError:
                return KEEP_ALIVE
        return self._waiting.popleft()


def _message_of(event: dict[str, Any]) -> str | None:
    return event.get("message_id") or event.get("message", {}).get("id")
