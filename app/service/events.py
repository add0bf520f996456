"""What happens in the service, told to every subscriber in one order, each event with its number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from typing import Any

from .responses import KEEP_ALIVE, sse_event
from .wakeup import Wakeup

MAX_BEHIND = 4096
"""Events that a subscriber may be behind. One that falls further is told to fetch everything again, and let go."""


class EventHub:
    """Lives on the event loop. Publishing never waits for anybody."""

    def __init__(self, on_subscribe: Callable[[], None] = lambda: None) -> None:
        self._on_subscribe = on_subscribe
        self.seq = 0
        """Number of the newest event. What was read when `seq` was n already holds the events up to n."""
        self._subscribers: defaultdict[str | None, set[Subscriber]] = defaultdict(set)
        """By the message that they want to hear of; None: of everything."""

    @property
    def num_subscribers(self) -> int:
        return sum(map(len, self._subscribers.values()))

    def publish(self, kind: str, **fields: Any) -> None:
        self.seq += 1
        event = {"seq": self.seq, "type": kind, **fields}
        data = sse_event(event)
        for message_id in {None, _message_of(event)}:
            for subscriber in self._subscribers.get(message_id, ()):
                subscriber.put(event, data)

    def close(self) -> None:
        """Every subscriber gets what it has not read yet, and the end."""
        for subscribers in self._subscribers.values():
            for subscriber in subscribers:
                subscriber.end()

    def subscribe(self, message_id: str | None = None) -> Subscriber:
        """Everything from now on, or with `message_id` what one reply brings, up to its end. Must be unsubscribed."""
        subscriber = Subscriber(self.seq, message_id)
        self._subscribers[message_id].add(subscriber)
        self._on_subscribe()
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        subscribers = self._subscribers[subscriber.message_id]
        subscribers.discard(subscriber)
        if not subscribers:
            del self._subscribers[subscriber.message_id]


class Subscriber:
    """Events queue up from its making on, read or not."""

    def __init__(self, seq: int, message_id: str | None):
        self._seq = seq
        self.message_id = message_id
        self._is_lagging = False
        self._is_ended = False
        self._waiting: list[bytes] = []
        self._wakeup = Wakeup()

    async def stream(self, first: dict[str, Any], keep_alive_s: float) -> AsyncGenerator[bytes, None]:
        """Server-sent events, `first` before them; those that a slow reader has let wait come together."""
        yield sse_event({"seq": self._seq, **first})
        while (data := await self._next(keep_alive_s)) is not None:
            yield data
        if self._is_lagging:
            yield sse_event({"seq": self._seq, "type": "resync"})

    def put(self, event: dict[str, Any], data: bytes) -> None:
        """An event that is the subscriber's."""
        if self._is_ended:
            return
        self._seq = event["seq"]
        if len(self._waiting) >= MAX_BEHIND:
            self._is_lagging = True
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

    async def _next(self, timeout_s: float) -> bytes | None:
        """The next events, a keep-alive comment after `timeout_s` without one, None at the end."""
        while not self._waiting:
            if self._is_ended:
                return None
            if not await self._wakeup.wait(timeout_s):
                return KEEP_ALIVE
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)


def _message_of(event: dict[str, Any]) -> str | None:
    return event.get("message_id") or event.get("message", {}).get("id")
