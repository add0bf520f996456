"""How sampling reads a row of logits, tile by tile, and what an id weighs. Device functions.

An id's distance is how many halvings less likely it is than the best of its row: (best - logit) * scale, with
scale = log2(e) / temperature. Its mass is 2^-distance as a fixed-point integer. Sums of masses are sums of integers,
so neither the order of adding nor the cutting into tiles changes a bit of them, and passes agree with each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a row's `numbers`, int32:
LOGIT_ROW = tl.constexpr(0)
"""Which row of the logits it is drawn from."""
CHANGED_ROW = tl.constexpr(1)
"""Which row of the changed logits holds its penalties and biases; -1: it has none."""
MASK_ROW = tl.constexpr(2)
"""Which row of the masks says what it may draw; -1: everything."""
TOP_K = tl.constexpr(3)
"""0: off."""
FARTHEST_KEPT = tl.constexpr(4)
"""min-p, as the greatest rank kept (see `ranks`); NO_BORDER: off."""
NUM_NUMBERS = tl.constexpr(5)

# Columns of a row's `factors`, float64:
SCALE = tl.constexpr(0)
"""log2(e) / temperature, 0 for greedy."""
TOP_P = tl.constexpr(1)
UNIFORM = tl.constexpr(2)
NUM_FACTORS = tl.constexpr(3)

FARTHEST = tl.constexpr(64.0 - 2.0**-18)
"""Distances end here: less than 2^-63 of the best is never drawn."""
MASS_OF_BEST = tl.constexpr(2.0**42)
"""2^20 ids of it fit 62 bits."""
RANKS_OF_HALVING = tl.constexpr(2.0**25)
NO_BORDER = tl.constexpr(2**31 - 1)
"""Above every rank."""


@triton.jit
def distances(values, best, scale):
    """float32 -> float32 in [0, FARTHEST]; FARTHEST as well where it is not a number, as in a row that is refused."""
    distance = (best - values) * scale
    return tl.where(distance < FARTHEST, distance, FARTHEST)


@triton.jit
def masses(distance):
    """float32 -> int64 in [0, MASS_OF_BEST]"""
    return (tl.exp2(-distance) * MASS_OF_BEST + 0.5).to(tl.int64)


@triton.jit
def ranks(distance):
    """float32 -> int32, 0 for the best, at most NO_BORDER - 1: distances in units of 2^-25. Equal ranks are equally
    likely."""
    return (distance * RANKS_OF_HALVING).to(tl.int32)


@triton.jit
def load_logits(logits, logits_stride, changed, numbers, row, ids, vocab_size):
    """float32 like ids: of the row's changed logits where it has such. -inf beyond the vocabulary."""
    changed_row = tl.load(numbers + row * NUM_NUMBERS + CHANGED_ROW)
    is_id = ids < vocab_size
    if changed_row >= 0:
        values = tl.load(changed + changed_row.to(tl.int64) * vocab_size + ids, mask=is_id, other=float("-inf"))
    else:
        logit_row = tl.load(numbers + row * NUM_NUMBERS + LOGIT_ROW).to(tl.int64)
        values = tl.load(logits + logit_row * logits_stride + ids, mask=is_id, other=float("-inf"))
    return values


@triton.jit
def ban(values, masks, num_words, mask_row, ids, vocab_size):
    """-inf where the mask's bit is 0. masks: int32 [any, num_words], bit id % 32 of word id / 32."""
    words = tl.load(masks + mask_row.to(tl.int64) * num_words + (ids >> 5), mask=ids < vocab_size, other=0)
    return tl.where(((words >> (ids & 31)) & 1) != 0, values, float("-inf"))


@triton.jit
def load_allowed(logits, logits_stride, changed, masks, num_words, numbers, row, mask_row, ids, vocab_size):
    """The logits that are drawn from. mask_row: as `row_best` has it."""
    values = load_logits(logits, logits_stride, changed, numbers, row, ids, vocab_size)
    if mask_row >= 0:
        values = ban(values, masks, num_words, mask_row, ids, vocab_size)
    return values


@triton.jit
def row_best(bests, numbers, row, vocab_size, NUM_TILES: tl.constexpr, TILE: tl.constexpr):
    """(the best logit of the row, its mask's row or -1, where its tiles' partial results begin).

    A mask that leaves nothing counts as none: partial results without it lie NUM_TILES behind.
    """
    tiles = tl.arange(0, NUM_TILES)
    is_tile = tiles * TILE < vocab_size
    mask_row = tl.load(numbers + row * NUM_NUMBERS + MASK_ROW)
    start = row * (2 * NUM_TILES)
    best = tl.max(tl.load(bests + start + tiles, mask=is_tile, other=float("-inf")), axis=0)
    if (mask_row >= 0) & (best == float("-inf")):
        mask_row = tl.full([], -1, tl.int32)
        start += NUM_TILES
        best = tl.max(tl.load(bests + start + tiles, mask=is_tile, other=float("-inf")), axis=0)
    return best, mask_row, start
