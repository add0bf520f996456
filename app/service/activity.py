"""Whether anybody uses the service: a service without clients ends after a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WATCHERS = frozenset({"/health", "/v1/health", "/metrics"})
"""A monitor that polls is no client."""


def _is_watching(path: str) -> bool:
    """Warming is what the app does by itself while a person reads."""
    return path in _WATCHERS or (path.startswith("/chatkv/chats/") and path.endswith("/warm"))


class Activity:
    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        """`on_request`: told that a client came."""
        self._on_request = on_request
        self._num_open = 0
        self._last = time.monotonic()

    @contextmanager
    def request(self, path: str) -> Iterator[None]:
        if _is_watching(path):
            yield
            return
        self._num_open += 1
        self._on_request()
        try:
            yield
        finally:
            self._num_open -= 1
            self._last = time.monotonic()

    @property
    def is_open(self) -> bool:
        """A client is being served."""
        return self._num_open > 0

    def idle_s(self, is_working: bool) -> float:
        """Seconds since the last client left or the last work ended."""
        if self._num_open or is_working:
            self._last = time.monotonic()
        return time.monotonic() - self._last
