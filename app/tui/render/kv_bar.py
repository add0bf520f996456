"""Where the blocks of a chain lie, as a bar of glyphs: one for each tier, so that colour is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, sqrt

from .palette import Glyphs

Cells = tuple[tuple[str, str], ...]
"""Pieces of the bar: (text, tier)."""


def tier_word(tier: str, device: str) -> str:
    """What people call a tier. On the CPU the device's pool is RAM itself, so "GPU" and "RAM" would both mislead."""
    words = {"device": "pool" if device in ("", "cpu") else "GPU", "host": "RAM", "disk": "disk"}
    return words.get(tier, tier)


def kv_bar(runs: Sequence[tuple[str, int]], num_cells: int, glyphs: Glyphs) -> Cells:
    """Exactly `num_cells` cells in proportion to the blocks; what is there at all gets a cell while there is room."""
    runs = _merged(runs)
    total = sum(count for _, count in runs)
    if not total or num_cells <= 0:
        return ((glyphs.kv_missing * max(0, num_cells), "missing"),)
    if len(runs) > num_cells:
        runs = _by_tier(runs)[:num_cells]
        total = sum(count for _, count in runs)
    spare = num_cells - len(runs)
    ends = [0.0]
    for _, count in runs:
        ends.append(ends[-1] + count * spare / total)
    # A cell for each run, and the rest in proportion: rounding the ends, not the lengths, keeps the sum.
    lengths = [1 + round(end) - round(start) for start, end in pairwise(ends)]
    return tuple((glyphs.of_tier(tier) * length, tier) for (tier, _), length in zip(runs, lengths, strict=True))


def bar_cells(num_blocks: int, most_blocks: int, num_cells: int) -> int:
    """Length of a chain's bar beside the longest one's: by the root, so that short chats can be seen too."""
    if num_blocks <= 0 or most_blocks <= 0:
        return 0
    return max(1, min(num_cells, ceil(num_cells * sqrt(num_blocks / most_blocks))))


def skip_blocks(runs: Sequence[tuple[str, int]], num_blocks: int) -> tuple[tuple[str, int], ...]:
    """The runs without their first blocks."""
    rest = []
    for tier, count in runs:
        skipped = min(count, num_blocks)
        num_blocks -= skipped
        if count > skipped:
            rest.append((tier, count - skipped))
    return tuple(rest)


def first_blocks(runs: Sequence[tuple[str, int]], num_blocks: int) -> tuple[tuple[str, int], ...]:
    taken = []
    for tier, count in runs:
        if num_blocks <= 0:
            break
        taken.append((tier, min(count, num_blocks)))
        num_blocks -= count
    return tuple(taken)


def _merged(runs: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    merged: list[tuple[str, int]] = []
    for tier, count in runs:
        if count <= 0:
            continue
        if merged and merged[-1][0] == tier:
            merged[-1] = (tier, merged[-1][1] + count)
        else:
            merged.append((tier, count))
    return merged


def _by_tier(runs: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """More pieces than cells: how much of each tier, in the order of their first appearance."""
    totals: dict[str, int] = {}
    for tier, count in runs:
        totals[tier] = totals.get(tier, 0) + count
    return list(totals.items())
