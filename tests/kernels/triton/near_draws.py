"""What float32 may draw: the specification's token, or one that it draws within a bound of the same settings."""

from __future__ import annotations

from itertools import product

from torch import Tensor

from chatkv.kernels import sampling_reference as reference


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Steps 4 to 8 of the specification. float64 [vocab]"""
    return reference.pick(reference.distribution(logits, temperature, top_k, top_p, min_p), uniform)


def may_draw(
    token_id: int,
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    bound: float,
) -> bool:
    """bound: of shares of the distribution."""
    if draw(logits, temperature, top_k, top_p, min_p, uniform) == token_id:
        return True
    shifts = (-bound, 0.0, bound)
    share_shifts = shifts if top_p < 1.0 else (0.0,)
    likely_shifts = shifts if min_p > 0.0 else (0.0,)
    for pick, share, likely in product(shifts, share_shifts, likely_shifts):
        near_p = min(max(top_p + share, 2.0**-53), 1.0)
        near_uniform = min(max(uniform + pick, 0.0), 1.0 - 2.0**-53)
        if draw(logits, temperature, top_k, near_p, min_p * (1.0 + likely), near_uniform) == token_id:
            return True
    return False
