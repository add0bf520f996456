"""The same token as `draw`, from few candidates: float32 says which ids can matter, float64 decides among them.

Why that is safe. With s = (logit - best) / temperature and w = exp(s), float32 gets s wrong by 3 roundings of |s|, and,
where penalties made the logit a float64, by one of the logit itself. Weighted by w, the mean of |s| is at most
ln(number of ids) < 13: it is the distribution's entropy less ln(sum of w), and that sum is at least 1. So a sum of
weights is off by at most so many roundings (2**-24 of it each): 39, and 13 + |best| / temperature for a float64, 5 of
exp, and those of adding. Where a border (of top-p, or of the pick) lies nearer than that to what it is compared with,
and wherever the candidates are many, the answer is None and the plain way is taken.
"""

from __future__ import annotations

import math

import numpy as np

from .draw import Ids, Row, Weights, at_border, kept_ids, pick, weights_of
from .request import SamplingParams

ROUNDING = 2.0**-24
NUM_ROUNDINGS = 39 + 5 + 64
"""Of a sum of float32 weights. The last is for the adding: numpy adds up to 128 in eights, and sums in pairs."""
MIN_TEMPERATURE = 1e-3
MAX_SCALED = 128.0
"""Of the best logit over the temperature."""
MAX_CANDIDATES = 4096
NUM_COLUMNS = 512
"""A maximum each: the k-th largest of them is no more than the k-th largest of all."""
PICK_BLOCK = 128
NUCLEUS_FLOORS = (1e-3, 1e-5)
"""Weights below are no candidates for top-p; the second where the first leaves too few."""


@np.errstate(over="ignore")  # what is beyond float32 is impossible, or no candidate at all
def quick_draw(logits: Row | Weights, sampling: SamplingParams, uniform: float) -> int | None:
    """logits: the row itself, or a float64 copy with penalties. None: it takes the plain way."""
    near: Row = logits.astype(np.float32, copy=False)
    best, temperature = float(near.max()), sampling.temperature
    if temperature < MIN_TEMPERATURE or not abs(best) <= MAX_SCALED * temperature:
        return None
    if (floor := _floor(near, best, sampling)) is not None:
        return _draw_above(logits, near, floor, sampling, uniform)
    if 0 < sampling.top_k < len(near):
        return None
    weights: Row = near - np.float32(best)
    weights *= np.float32(1 / temperature)
    np.exp(weights, out=weights)
    num_roundings = NUM_ROUNDINGS + (0.0 if near is logits else 13 + abs(best) / temperature)
    if sampling.top_p < 1.0:
        return _draw_nucleus(logits, weights, num_roundings * ROUNDING, sampling, uniform)
    return _draw_any(logits, weights, num_roundings * ROUNDING, temperature, uniform)


def _floor(near: Row, best: float, sampling: SamplingParams) -> float | None:
    """A logit below which nothing is kept, whatever the sum of all weights is. None: there is no such."""
    floors = []
    if 0 < sampling.top_k <= NUM_COLUMNS and len(near) >= 2 * NUM_COLUMNS:
        maxima = near[: len(near) // NUM_COLUMNS * NUM_COLUMNS].reshape(-1, NUM_COLUMNS).max(0)
        floors.append(float(np.partition(maxima, NUM_COLUMNS - sampling.top_k)[NUM_COLUMNS - sampling.top_k]))
    if sampling.min_p > 0.0 and sampling.top_p == 1.0:
        floors.append(best + sampling.temperature * math.log(sampling.min_p))
    return max(floors, default=None)


def _draw_above(logits: Row | Weights, near: Row, floor: float, sampling: SamplingParams, uniform: float) -> int | None:
    slack = 1e-4 * sampling.temperature + 1e-6 * abs(floor)  # roundings, and ids that are equally likely
    candidates = _candidates(near, floor - slack)
    if candidates is None:
        return None
    weights = weights_of(logits[candidates], sampling.temperature)
    kept = kept_ids(weights, sampling)
    if kept is None:  # there are top-k candidates, neither more nor fewer
        return int(candidates[pick(weights, uniform)])
    return int(candidates[kept[pick(weights[kept], uniform)]])


def _draw_nucleus(
    logits: Row | Weights, near: Row, error: float, sampling: SamplingParams, uniform: float
) -> int | None:
    """Top-p and min-p. near: weights; error: of their sum, relative."""
    total = float(near.sum())
    enough, margin = sampling.top_p * total, error * total
    for floor in NUCLEUS_FLOORS:
        candidates = _candidates(near, floor)
        if candidates is None:
            return None
        weights = weights_of(logits[candidates], sampling.temperature)
        descending = np.sort(weights)[::-1]
        sums = np.cumsum(descending)
        last = int(np.searchsorted(sums, enough, side="left"))
        if last == len(sums) or descending[last] < 1.01 * floor:
            continue  # some of the nucleus may be no candidates
        if sums[last] - enough < margin or enough - (sums[last - 1] if last else 0.0) < margin:
            return None
        kept = at_border(weights, float(descending[last]), last + 1)
        if sampling.min_p > 0.0:
            kept = kept[weights[kept] >= sampling.min_p]
        return int(candidates[kept[pick(weights[kept], uniform)]])
    return None


def _draw_any(logits: Row | Weights, near: Row, error: float, temperature: float, uniform: float) -> int | None:
    """Without a filter. near, error: as above. Only the block of ids where the pick falls is looked at closely."""
    sums = np.cumsum(np.add.reduceat(near, np.arange(0, len(near), PICK_BLOCK)), dtype=np.float64)
    target, margin = uniform * sums[-1], error * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    start = block * PICK_BLOCK
    before = sums[block - 1] if block else 0.0
    weights = weights_of(logits[start : start + PICK_BLOCK], temperature, float(logits.max()))
    inside = before + np.cumsum(weights)
    index = int(np.searchsorted(inside, target, side="right"))
    if index == len(inside) or inside[index] - target < margin:
        return None
    before = inside[index - 1] if index else before
    return start + index if target - before >= margin else None


def _candidates(values: Row, floor: float) -> Ids | None:
    """Ascending; None: too many."""
    is_above = values >= np.float32(floor)
    if int(np.count_nonzero(is_above)) > MAX_CANDIDATES:
        return None
    return np.flatnonzero(is_above)
