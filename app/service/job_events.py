"""Pull jobs report on their own threads; subscribers hear of it on the loop, a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from chatkv.app.hub.jobs import JobSnapshot

from .events import EventHub

MIN_INTERVAL_S = 0.1


class JobEvents:
    """The `on_change` of a JobRunner."""

    def __init__(self, loop: asyncio.AbstractEventLoop, events: EventHub, on_pulled: Callable[[str], None]):
        self._loop = loop
        self._events = events
        self._on_pulled = on_pulled
        self._last: dict[str, tuple[str, str, float]] = {}
        """By job: state, stage and time of the last event."""

    def __call__(self, snapshot: JobSnapshot) -> None:
        now = time.monotonic()
        state, stage, told_at = self._last.get(snapshot.id, ("", "", 0.0))
        if (state, stage) == (snapshot.state, snapshot.stage) and now - told_at < MIN_INTERVAL_S:
            return
        self._last[snapshot.id] = (snapshot.state, snapshot.stage, now)
        if snapshot.state != "running":
            del self._last[snapshot.id]
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody listens any more.
            self._loop.call_soon_threadsafe(self._publish, snapshot)

    def _publish(self, snapshot: JobSnapshot) -> None:
        self._events.publish("job", job=snapshot.as_json())
        if snapshot.state == "done":
            self._on_pulled(snapshot.name)
