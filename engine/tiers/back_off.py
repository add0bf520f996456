"""How long a faulty disk is left alone: longer after each failure in a row."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 60.0


class BackOff:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._num_failures = 0
        self._until = 0.0

    @property
    def remaining_s(self) -> float:
        """0: try."""
        return max(0.0, self._until - self._monotonic())

    @property
    def is_failing(self) -> bool:
        return self._num_failures > 0

    def fail(self) -> None:
        self._until = self._monotonic() + min(FIRST_S * 2.0**self._num_failures, LONGEST_S)
        self._num_failures += 1

    def succeed(self) -> None:
        self._num_failures = 0
        self._until = 0.0
