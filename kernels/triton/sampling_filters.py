"""Top-k and top-p without sorting: where the border lies is searched by the digits of an id's rank.

A rank has 31 bits. Each level counts, for the ids that share the digits found so far, how many have which next digit
and what they weigh together; the next digit of the border is the first at which enough are reached. Three levels give
the border's rank, and how many ids of exactly that rank stay: those with the lowest ids. Counts and masses are
integers, added atomically in any order with one result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_settings import DrawSettings
from .sampling_rows import (
    FARTHEST_KEPT,
    NO_BORDER,
    NUM_FACTORS,
    NUM_NUMBERS,
    SCALE,
    TOP_K,
    TOP_P,
    distances,
    load_allowed,
    masses,
    ranks,
    row_best,
)

NUM_LEVELS = 3
LAST_LEVEL = tl.constexpr(NUM_LEVELS - 1)
DIGIT_BITS = tl.constexpr(10)
LAST_DIGIT = tl.constexpr(2**10 - 1)
NUM_DIGITS = 2048
"""Of the first level, which has 11 bits; the others use half of them."""

_TILE_WARPS = 8
_NARROW_WARPS = 8

# What is searched:
EITHER = 0
BY_COUNT = 1
BY_MASS = 2
_BY_COUNT = tl.constexpr(BY_COUNT)
_BY_MASS = tl.constexpr(BY_MASS)

# Columns of a row's `borders`, int64:
BORDER = tl.constexpr(0)
"""The rank; before the last level, its digits so far."""
NUM_BEFORE = tl.constexpr(1)
MASS_BEFORE = tl.constexpr(2)
"""Of the ids nearer to the best than those digits."""
MASS_WANTED = tl.constexpr(3)
NUM_AT_BORDER = tl.constexpr(4)
"""How many ids of that rank stay."""
MASS_KEPT = tl.constexpr(5)
NUM_BORDERS = tl.constexpr(6)


@triton.jit
def is_searched(numbers, factors, row, SEARCH: tl.constexpr):
    """Whether the row has a top-k (BY_COUNT), a top-p (BY_MASS), either."""
    has_top_k = tl.load(numbers + row * NUM_NUMBERS + TOP_K) > 0
    has_top_p = tl.load(factors + row * NUM_FACTORS + TOP_P) < 1.0
    if SEARCH == _BY_COUNT:
        return has_top_k
    elif SEARCH == _BY_MASS:
        return has_top_p
    else:
        return has_top_k | has_top_p


@triton.jit
def load_border(borders, numbers, factors, row):
    """(border's rank, how many ids of it stay, greatest rank that min-p keeps): int32, int64, int32."""
    border = tl.full([], NO_BORDER, tl.int32)
    num_at_border = tl.full([], 0, tl.int64)
    if is_searched(numbers, factors, row, 0):
        border = tl.load(borders + row * NUM_BORDERS + BORDER).to(tl.int32)
        num_at_border = tl.load(borders + row * NUM_BORDERS + NUM_AT_BORDER)
    return border, num_at_border, tl.load(numbers + row * NUM_NUMBERS + FARTHEST_KEPT)


@triton.jit(do_not_specialize=["num_words"])
def count_kernel(
    logits,
    logits_stride,
    changed,
    masks,
    num_words,
    numbers,
    factors,
    bests,
    borders,
    histograms,
    vocab_size,
    SEARCH: tl.constexpr,
    LEVEL: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
):
    """A tile's part of a level. histograms: int64 [R, 2, NUM_DIGITS], counts and masses, zeros at first."""
    tile, row = tl.program_id(0), tl.program_id(1)
    if is_searched(numbers, factors, row, SEARCH):
        ids = tile * TILE + tl.arange(0, TILE)
        best, mask_row, _ = row_best(bests, numbers, row, vocab_size, NUM_TILES, TILE)
        values = load_allowed(logits, logits_stride, changed, masks, num_words, numbers, row, mask_row, ids, vocab_size)
        distance = distances(values, best, tl.load(factors + row * NUM_FACTORS + SCALE).to(tl.float32))
        rank = ranks(distance)
        is_counted = ids < vocab_size
        if LEVEL > 0:
            found = tl.load(borders + row * NUM_BORDERS + BORDER).to(tl.int32)
            is_counted = is_counted & ((rank >> ((LAST_LEVEL - LEVEL + 1) * DIGIT_BITS)) == found)
            digits = (rank >> ((LAST_LEVEL - LEVEL) * DIGIT_BITS)) & LAST_DIGIT
        else:
            digits = rank >> (LAST_LEVEL * DIGIT_BITS)
        cells = histograms + row * (2 * NUM_DIGITS) + digits
        mass = masses(distance)
        ones = tl.full([TILE], 1, tl.int64)
        tl.atomic_add(cells, ones, mask=is_counted, sem="relaxed")
        tl.atomic_add(cells + NUM_DIGITS, mass, mask=is_counted & (mass > 0), sem="relaxed")


@triton.jit
def narrow_kernel(
    numbers, factors, borders, histograms, SEARCH: tl.constexpr, LEVEL: tl.constexpr, NUM_DIGITS: tl.constexpr
):
    """A row's next digit of the border. Top-p takes its share of what top-k has left (MASS_KEPT of that search)."""
    row = tl.program_id(0)
    if is_searched(numbers, factors, row, SEARCH):
        digits = tl.arange(0, NUM_DIGITS)
        at = borders + row * NUM_BORDERS
        counts = tl.load(histograms + row * (2 * NUM_DIGITS) + digits)
        sums = tl.load(histograms + row * (2 * NUM_DIGITS) + NUM_DIGITS + digits)
        found = tl.full([], 0, tl.int64)
        num_before = tl.full([], 0, tl.int64)
        mass_before = tl.full([], 0, tl.int64)
        if LEVEL > 0:
            found = tl.load(at + BORDER)
            num_before = tl.load(at + NUM_BEFORE)
            mass_before = tl.load(at + MASS_BEFORE)
        num_wanted = tl.load(numbers + row * NUM_NUMBERS + TOP_K).to(tl.int64)
        mass_wanted = tl.full([], 0, tl.int64)
        if SEARCH == _BY_MASS:
            if LEVEL > 0:
                mass_wanted = tl.load(at + MASS_WANTED)
            else:
                total = tl.sum(sums, axis=0)
                if num_wanted > 0:
                    total = tl.load(at + MASS_KEPT)
                share = tl.load(factors + row * NUM_FACTORS + TOP_P) * total.to(tl.float64)
                mass_wanted = tl.maximum(tl.ceil(share).to(tl.int64), 1)
            is_enough = mass_before + tl.cumsum(sums, axis=0) >= mass_wanted
        else:
            is_enough = num_before + tl.cumsum(counts, axis=0) >= num_wanted
        # Rounding of the share may ask for more than there is: then the last.
        digit = tl.min(tl.where(is_enough, digits, NUM_DIGITS - 1), axis=0)
        if LEVEL > 0:
            digit = tl.minimum(digit, LAST_DIGIT)
        num_before += tl.sum(tl.where(digits < digit, counts, 0), axis=0)
        mass_before += tl.sum(tl.where(digits < digit, sums, 0), axis=0)
        tl.store(at + BORDER, (found << DIGIT_BITS) + digit)
        tl.store(at + NUM_BEFORE, num_before)
        tl.store(at + MASS_BEFORE, mass_before)
        tl.store(at + MASS_WANTED, mass_wanted)
        if LEVEL == LAST_LEVEL:
            num_here = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
            mass_here = tl.sum(tl.where(digits == digit, sums, 0), axis=0)
            mass_of_each = mass_here // tl.maximum(num_here, 1)
            if SEARCH == _BY_MASS:
                mass_of_one = tl.maximum(mass_of_each, 1)
                num_kept = (mass_wanted - mass_before + mass_of_one - 1) // mass_of_one
                num_kept = tl.maximum(tl.minimum(num_kept, num_here), 1)
            else:
                num_kept = num_wanted - num_before
            tl.store(at + NUM_AT_BORDER, num_kept)
            tl.store(at + MASS_KEPT, mass_before + num_kept * mass_of_each)


@triton.jit(do_not_specialize=["num_words"])
def keep_kernel(
    logits,
    logits_stride,
    changed,
    masks,
    num_words,
    numbers,
    factors,
    bests,
    borders,
    tile_masses,
    border_counts,
    border_masses,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """What the filters leave of a tile: the mass of its ids within the border replaces the tile's whole mass; number
    and mass of those at the border lie beside it. Masses are relative to the tile's own best."""
    tile, row = tl.program_id(0), tl.program_id(1)
    border, _, farthest = load_border(borders, numbers, factors, row)
    if tl.minimum(border, farthest) < NO_BORDER:
        ids = tile * TILE + tl.arange(0, TILE)
        best, mask_row, start = row_best(bests, numbers, row, vocab_size, NUM_TILES, TILE)
        values = load_allowed(logits, logits_stride, changed, masks, num_words, numbers, row, mask_row, ids, vocab_size)
        scale = tl.load(factors + row * NUM_FACTORS + SCALE).to(tl.float32)
        rank = ranks(distances(values, best, scale))
        mass = masses(distances(values, tl.load(bests + start + tile), scale))
        is_kept = (ids < vocab_size) & (rank <= farthest)
        is_at_border = is_kept & (rank == border)
        tl.store(tile_masses + start + tile, tl.sum(tl.where(is_kept & (rank < border), mass, 0), axis=0))
        tl.store(border_counts + row * NUM_TILES + tile, tl.sum(is_at_border.to(tl.int32), axis=0))
        tl.store(border_masses + row * NUM_TILES + tile, tl.sum(tl.where(is_at_border, mass, 0), axis=0))


def find_borders(
    rows: tuple[Any, ...],
    bests: Tensor,
    borders: Tensor,
    settings: DrawSettings,
    vocab_size: int,
    grid: tuple[int, int],
    cut: dict[str, Any],
) -> None:
    """Top-k's border, then top-p's in what that leaves. Both begin with the same counts of first digits."""
    numbers, factors = settings.numbers, settings.factors
    searches = [search for search, has in ((BY_COUNT, settings.has_top_k), (BY_MASS, settings.has_top_p)) if has]
    num_histograms = 1 + len(searches) * (NUM_LEVELS - 1)
    histograms = torch.zeros(
        (num_histograms, len(numbers), 2, NUM_DIGITS), dtype=torch.int64, device=numbers.device
    ).unbind()
    count: Any = count_kernel
    narrow: Any = narrow_kernel

    def count_digits(histogram: Tensor, search: int, level: int) -> None:
        count[grid](
            *rows,
            bests,
            borders,
            histogram,
            vocab_size,
            SEARCH=search,
            LEVEL=level,
            **cut,
            NUM_DIGITS=NUM_DIGITS,
            num_warps=_TILE_WARPS,
        )

    count_digits(histograms[0], EITHER, 0)
    unused = iter(histograms[1:])
    for search in searches:
        for level in range(NUM_LEVELS):
            histogram = histograms[0] if level == 0 else next(unused)
            if level > 0:
                count_digits(histogram, search, level)
            narrow[(len(numbers),)](
                numbers,
                factors,
                borders,
                histogram,
                SEARCH=search,
                LEVEL=level,
                NUM_DIGITS=NUM_DIGITS,
                num_warps=_NARROW_WARPS,
            )
