"""How fast blocks come from a tier: bytes over the time with at least one read under way, verification included."""

from __future__ import annotations

SAMPLE_BYTES = 16 << 20
"""Shorter samples would measure latency alone."""
NEW_SHARE = 0.2


class ReadRate:
    """Moving average of samples. Times in seconds, from one monotonic clock. Its owner has a lock."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        """0 while unknown."""
        self._num_active = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0

    def begin(self, now: float) -> None:
        if self._num_active == 0:
            self._since = now
        self._num_active += 1

    def end(self, now: float, num_bytes: int) -> None:
        """`num_bytes`: 0 for a read that failed; its time still counts."""
        self._busy_s += now - self._since
        self._since = now
        self._num_active -= 1
        self._num_bytes += num_bytes
        if self._num_bytes >= SAMPLE_BYTES and self._busy_s > 0:
            self.add_sample(self._num_bytes / self._busy_s)
            self._num_bytes, self._busy_s = 0, 0.0

    def give_up(self) -> None:
        """A read hangs; the time until its deadline says nothing about the others."""
        self._num_active -= 1
        self._num_bytes, self._busy_s = 0, 0.0

    def add_sample(self, bytes_per_s: float) -> None:
        share = NEW_SHARE if self.bytes_per_s else 1.0
        self.bytes_per_s += share * (bytes_per_s - self.bytes_per_s)
