"""Cosines and sines of rotary embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Angles = NDArray[np.float32]


def angles_of(
    start: int, end: int, inverse_frequencies: NDArray[np.float32], attention_factor: float
) -> tuple[Angles, Angles]:
    """cos and sin of positions start .. end - 1, float32 [end - start, head_dim / 2], times `attention_factor`.

    The angle is a float32 product, as models were trained; its cosine and sine are taken in float64 and rounded, so
    that they are the same whatever is computed beside them. inverse_frequencies: [head_dim / 2].
    """
    positions = np.arange(start, end).astype(np.float32)
    angles = (positions[:, np.newaxis] * inverse_frequencies).astype(np.float64)
    cos, sin = ((function(angles) * attention_factor).astype(np.float32) for function in (np.cos, np.sin))
    return cos, sin
