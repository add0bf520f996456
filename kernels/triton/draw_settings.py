"""How each token is drawn, as the sampling kernels read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .sampling_rows import NO_BORDER, RANKS_OF_HALVING

_MAX_SCALE = 2.0**126


@dataclass(frozen=True)
class DrawSettings:
    """What each of R tokens is drawn with; tensors on the device (engine/device_sampler.py makes them)."""

    numbers: Tensor
    """int32 [R, 5]: row of the logits, of the changed logits or -1, of the masks or -1; top-k or 0; min-p's rank."""
    factors: Tensor
    """float64 [R, 3]: `scale_of` the temperature, top-p or 1, a uniform number in [0, 1)."""
    masks: Tensor
    """int32 [any, ceil(vocab_size / 32)]: bit id % 32 of word id // 32 is 1 where the id may be drawn."""
    has_top_k: bool
    """Some row has it."""
    has_top_p: bool
    has_min_p: bool


def scale_of(temperature: float) -> float:
    """The factor of a row; 0 for greedy."""
    return 0.0 if temperature == 0.0 else min(math.log2(math.e) / temperature, _MAX_SCALE)


def farthest_rank(min_p: float) -> int:
    """The greatest rank of an id that is at least `min_p` times as likely as the best."""
    if min_p <= 0.0:
        return NO_BORDER.value
    return min(int(-math.log2(min_p) * RANKS_OF_HALVING.value), NO_BORDER.value)
