"""Cosines and sines of rotary embedding, one row per position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...angles import angles_of

FIRST_CAPACITY = 1024


class AngleTable:
    """Grows as positions are met."""

    def __init__(self, inverse_frequencies: NDArray[np.float32], attention_factor: float) -> None:
        """inverse_frequencies: [head_dim / 2]."""
        self._inverse_frequencies = inverse_frequencies
        self._attention_factor = attention_factor
        empty = np.empty((0, len(inverse_frequencies)), np.float32)
        self._cos, self._sin = empty, empty

    def look_up(
        self, positions: NDArray[np.int64], end: int, cos: NDArray[np.float32], sin: NDArray[np.float32]
    ) -> None:
        """Positions [n], all below `end`, into `cos` and `sin` [n, head_dim / 2]."""
        if end > len(self._cos):
            self._grow(end)
        # "clip" skips a second pass; positions are within anyway.
        np.take(self._cos, positions, axis=0, out=cos, mode="clip")
        np.take(self._sin, positions, axis=0, out=sin, mode="clip")

    def _grow(self, end: int) -> None:
        end = max(end, 2 * len(self._cos), FIRST_CAPACITY)
        cos, sin = angles_of(len(self._cos), end, self._inverse_frequencies, self._attention_factor)
        self._cos, self._sin = np.concatenate((self._cos, cos)), np.concatenate((self._sin, sin))
