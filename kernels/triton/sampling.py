"""Draws a token from each row of logits on the device, by the specification of kernels/sampling_reference.py.

Two passes over the vocabulary. The first reads it in tiles and leaves of each tile its best logit, that one's id and
the tile's mass (sampling_rows.py says what mass is). The second, a program a row, picks the tile from these, and the id
from a second look at that tile alone. Rows with a top-k, top-p or min-p have passes between (sampling_filters.py),
which find a border and what is within it tile by tile; the logits lie in the L2 cache by then. Penalties and biases
work on a copy of those rows that have any (logit_changes.py). Greedy rows need the first pass alone.

A row's token depends on no other row, and there are no floating-point sums whose order could vary.

The head is left to linear.py: a fused first pass would save writing and reading 8 bytes an id and row, beside
hidden / 2 to 2 * hidden bytes of weights an id, and would be needed once more for each weight format and row count.

How near it comes to float64. With s = (logit - best) / temperature, float32 gets s wrong by 3 roundings (2^-24) of |s|,
exp2 adds 5, fixed point 2. Weighted by exp(s), the mean of |s| is below ln(vocabulary) < 13 (see engine/quick_draw.py),
so sums of masses are off by at most 13 * 3 + 7 = 46 roundings of the whole, and a share of the total by twice that:
`BORDER_ROUNDINGS`. A changed logit was rounded once to float32: that makes its weight wrong by |logit| / temperature
roundings more. Where the pick, top-p's border or min-p's lies nearer than that to a border between ids, the id next
to it may be drawn; and top-k takes ids for equally likely (the lower id stays) whose s differ by less than these
roundings of |s|, or by 2^-25.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .draw_settings import DrawSettings
from .runtime import ceil_div, next_power_of_two
from .sampling_filters import NUM_BORDERS, find_borders, keep_kernel, load_border
from .sampling_rows import (
    LOGIT_ROW,
    MASK_ROW,
    NO_BORDER,
    NUM_FACTORS,
    NUM_NUMBERS,
    SCALE,
    UNIFORM,
    ban,
    distances,
    load_allowed,
    load_logits,
    masses,
    ranks,
    row_best,
)

BORDER_ROUNDINGS = 92
"""Of 2^-24: how near to a border of shares float32 may decide otherwise than float64."""
TILE = 2048
_TILE_WARPS = 8
_PICK_WARPS = 16


@triton.jit
def store_partials(values, ids, scale, at, bests, best_ids, tile_masses, vocab_size):
    best = tl.max(values, axis=0)
    tl.store(bests + at, best)
    tl.store(best_ids + at, tl.min(tl.where(values == best, ids, vocab_size), axis=0))
    tl.store(tile_masses + at, tl.sum(masses(distances(values, best, scale)), axis=0))


@triton.jit(do_not_specialize=["num_words"])
def measure_kernel(
    logits,
    logits_stride,
    changed,
    masks,
    num_words,
    numbers,
    factors,
    bests,
    best_ids,
    tile_masses,
    tiles_finite,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """First pass. With a mask the partial results come twice: as it allows, and NUM_TILES behind without it."""
    tile, row = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logit_row = tl.load(numbers + row * NUM_NUMBERS + LOGIT_ROW).to(tl.int64)
    given = tl.load(logits + logit_row * logits_stride + ids, mask=ids < vocab_size, other=0.0)
    is_finite = tl.abs(given) < float("inf")
    tl.store(tiles_finite + row * NUM_TILES + tile, tl.min(is_finite.to(tl.int32), axis=0))
    scale = tl.load(factors + row * NUM_FACTORS + SCALE).to(tl.float32)
    values = load_logits(logits, logits_stride, changed, numbers, row, ids, vocab_size)
    at = row * (2 * NUM_TILES) + tile
    mask_row = tl.load(numbers + row * NUM_NUMBERS + MASK_ROW)
    if mask_row >= 0:
        store_partials(values, ids, scale, at + NUM_TILES, bests, best_ids, tile_masses, vocab_size)
        values = ban(values, masks, num_words, mask_row, ids, vocab_size)
    store_partials(values, ids, scale, at, bests, best_ids, tile_masses, vocab_size)


@triton.jit(do_not_specialize=["num_words"])
def pick_kernel(
    logits,
    logits_stride,
    changed,
    masks,
    num_words,
    numbers,
    factors,
    bests,
    best_ids,
    tile_masses,
    tiles_finite,
    borders,
    border_counts,
    border_masses,
    token_ids,
    are_finite,
    vocab_size,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Second pass: a row's token. The masses of tiles, brought to the unit of the best of them, are one cumulative
    distribution; what the target is beyond the start of its tile is looked for inside the tile."""
    row = tl.program_id(0)
    tiles = tl.arange(0, NUM_TILES)
    is_tile = tiles * TILE < vocab_size
    best, mask_row, start = row_best(bests, numbers, row, vocab_size, NUM_TILES, TILE)
    tile_bests = tl.load(bests + start + tiles, mask=is_tile, other=float("-inf"))
    scale = tl.load(factors + row * NUM_FACTORS + SCALE).to(tl.float32)
    tile_best_ids = tl.load(best_ids + start + tiles, mask=is_tile, other=vocab_size)
    token_id = tl.min(tl.where(tile_bests == best, tile_best_ids, vocab_size), axis=0)
    if scale > 0.0:
        border, num_at_border, farthest = load_border(borders, numbers, factors, row)
        tile_mass = tl.load(tile_masses + start + tiles, mask=is_tile, other=0)
        num_kept = tl.full([NUM_TILES], 0, tl.int64)
        if tl.minimum(border, farthest) < NO_BORDER:
            # The lowest ids at the border stay, so the first tiles' do.
            count = tl.load(border_counts + row * NUM_TILES + tiles, mask=is_tile, other=0).to(tl.int64)
            mass = tl.load(border_masses + row * NUM_TILES + tiles, mask=is_tile, other=0)
            num_left = tl.maximum(num_at_border - (tl.cumsum(count, axis=0) - count), 0)
            num_kept = tl.minimum(num_left, count)
            tile_mass += mass // tl.maximum(count, 1) * num_kept
        factor = tl.exp2(-distances(tile_bests, best, scale)).to(tl.float64)
        tile_mass = (tile_mass.to(tl.float64) * factor).to(tl.int64)
        ends = tl.cumsum(tile_mass, axis=0)
        total = tl.sum(tile_mass, axis=0)
        uniform = tl.load(factors + row * NUM_FACTORS + UNIFORM)
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        tile = tl.min(tl.where(ends > target, tiles, NUM_TILES), axis=0)
        is_picked = tiles == tile
        num_kept_here = tl.sum(tl.where(is_picked, num_kept, 0), axis=0)
        beyond = target - tl.sum(tl.where(is_picked, ends - tile_mass, 0), axis=0)
        unit = tl.sum(tl.where(is_picked, factor, 0.0), axis=0)
        wanted = (beyond.to(tl.float64) / tl.where(unit > 0.0, unit, 1.0)).to(tl.int64)

        ids = tile * TILE + tl.arange(0, TILE)
        values = load_allowed(logits, logits_stride, changed, masks, num_words, numbers, row, mask_row, ids, vocab_size)
        rank = ranks(distances(values, best, scale))
        is_at_border = rank == border
        index_at_border = tl.cumsum(is_at_border.to(tl.int32), axis=0) - 1
        is_kept = (rank < border) | (is_at_border & (index_at_border < num_kept_here))
        is_kept = is_kept & (rank <= farthest) & (ids < vocab_size)
        tile_best = tl.max(tl.where(is_picked, tile_bests, float("-inf")), axis=0)
        mass = tl.where(is_kept, masses(distances(values, tile_best, scale)), 0)
        # What rounding put beyond the tile's end is its last id.
        wanted = tl.minimum(wanted, tl.sum(mass, axis=0) - 1)
        is_reached = (tl.cumsum(mass, axis=0) > wanted) & (mass > 0)
        picked_id = tl.min(tl.where(is_reached, ids, vocab_size), axis=0)
        token_id = tl.where(picked_id < vocab_size, picked_id, token_id)
    # A row that is refused may have no best.
    tl.store(token_ids + row, tl.where(token_id < vocab_size, token_id, 0))
    finite = tl.load(tiles_finite + row * NUM_TILES + tiles, mask=is_tile, other=1)
    tl.store(are_finite + row, tl.min(finite, axis=0))


def draw_tokens(
    logits: Tensor,
    changed: Tensor,
    settings: DrawSettings,
    vocab_size: int,
    token_ids: Tensor,
    are_finite: Tensor,
    tile: int = TILE,
) -> None:
    """Fills token_ids and are_finite, int32 [R] each: 1 where every logit of the row is finite. A row that has NaN or
    infinity above gets some id of the vocabulary; -inf is an id that is not drawn.

    logits: float32 [any, vocab_size or more], left as they are; changed: float32 [any, vocab_size], the rows with
    penalties and biases applied. tile: ids a program, a power of two. Nothing waits for the device.
    """
    assert logits.dtype == changed.dtype == torch.float32
    assert logits.stride(1) == 1, "a row's logits lie together"
    assert logits.shape[1] >= vocab_size
    assert changed.is_contiguous()
    assert changed.shape[1] == vocab_size
    assert settings.factors.dtype == torch.float64
    assert settings.numbers.dtype == settings.masks.dtype == token_ids.dtype == are_finite.dtype == torch.int32
    num_rows, num_tiles = len(settings.numbers), ceil_div(vocab_size, tile)
    width, device = next_power_of_two(num_tiles), logits.device
    cut: dict[str, Any] = {"NUM_TILES": width, "TILE": tile}
    masked = (settings.masks, settings.masks.shape[1])
    rows = (logits, logits.stride(0), changed, *masked, settings.numbers, settings.factors)
    bests = torch.empty((num_rows, 2, width), dtype=torch.float32, device=device)
    best_ids = torch.empty((num_rows, 2, width), dtype=torch.int32, device=device)
    tile_masses = torch.empty((num_rows, 2, width), dtype=torch.int64, device=device)
    tiles_finite = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    tile_grid, row_grid = (num_tiles, num_rows), (num_rows,)
    kernel: Any = measure_kernel
    kernel[tile_grid](*rows, bests, best_ids, tile_masses, tiles_finite, vocab_size, **cut, num_warps=_TILE_WARPS)
    # Never read where no row is filtered.
    borders = torch.empty((num_rows, NUM_BORDERS.value), dtype=torch.int64, device=device)
    border_counts, border_masses = tiles_finite, tile_masses
    if settings.has_top_k or settings.has_top_p:
        find_borders(rows, bests, borders, settings, vocab_size, tile_grid, cut)
    if settings.has_top_k or settings.has_top_p or settings.has_min_p:
        border_counts = torch.empty((num_rows, width), dtype=torch.int32, device=device)
        border_masses = torch.empty((num_rows, width), dtype=torch.int64, device=device)
        kernel = keep_kernel
        kernel[tile_grid](
            *rows, bests, borders, tile_masses, border_counts, border_masses, vocab_size, **cut, num_warps=_TILE_WARPS
        )
    kernel = pick_kernel
    kernel[row_grid](
        *rows,
        bests,
        best_ids,
        tile_masses,
        tiles_finite,
        borders,
        border_counts,
        border_masses,
        token_ids,
        are_finite,
        vocab_size,
        **cut,
        num_warps=_PICK_WARPS,
    )
