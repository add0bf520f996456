"""The arithmetic of attention on tiles of keys at absolute positions.

A tile is KEY_TILE positions, counted from the start of the sequence. Each (query row, tile) is reduced on its own, in
products of one fixed shape; tiles are then combined in ascending order. A tile that a row does not see adds exact
zeros. So a row's bits depend neither on the rows beside it nor on how many tiles others need.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .invariance import CANDIDATES, measured_once, smallest_safe
from .threads import single_thread

KEY_TILE = 256
"""Positions. Part of the numerics: another size gives other bits."""
HIDDEN_SCORE = -1e30
"""Finite, so that a row which sees nothing of a tile gives no NaN; its weight is exp(-1e30 - x) = 0 exactly."""
MAX_QUERY_ROWS = 128
"""Rows of one product: query tokens times query heads per KV head."""


class TileResult(NamedTuple):
    """Per item: one query tile against one key tile."""

    outputs: Tensor
    """[items, num_kv_heads, rows, head_dim]: softmax within the tile, times V."""
    maxima: Tensor
    """[items, num_kv_heads, rows]: largest score."""
    peaks: Tensor
    """Same shape: the largest weight of the softmax, which is 1 / sum(exp(score - maximum))."""


class TileProducts:
    """Batched products whose rows keep their bits, whatever the number of rows and items."""

    def __init__(self) -> None:
        self.row_multiple: int | None = 4

    def seal(self, head_dim: int) -> None:
        """Measure for this head size which row counts are safe; where none is, rows are multiplied one by one."""
        unsafe = measured_once(("tiles", KEY_TILE, head_dim), lambda: _unsafe_row_counts(head_dim))
        # One row never goes to a batched product: torch has a path of its own for vectors.
        self.row_multiple = smallest_safe(unsafe | {1})

    def pad_rows(self, queries: Tensor) -> Tensor:
        """[..., rows, head_dim] with zero rows added up to the multiple."""
        padding = -queries.shape[-2] % (self.row_multiple or CANDIDATES[0])
        return F.pad(queries, (0, 0, 0, padding)) if padding else queries

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """[items, rows, k] x [items, k, n] -> [items, rows, n]."""
        if self.row_multiple:
            return torch.bmm(left, right)
        items = zip(left.unbind(0), right.unbind(0), strict=True)
        return torch.stack([torch.cat([row.clone() @ matrix for row in rows.split(1)]) for rows, matrix in items])

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, first_hidden: int
    ) -> TileResult:
        """Scores, softmax and outputs within each tile.

        queries: [items, num_kv_heads, rows, head_dim], scaled and padded; keys, values: [items, num_kv_heads,
        KEY_TILE, head_dim]; hidden: bool, broadcastable to the scores of the items from `first_hidden` on.
        """
        items, num_kv_heads, num_rows, head_dim = queries.shape
        flat = (items * num_kv_heads, -1, head_dim)
        scores = self.product(queries.reshape(flat), keys.view(flat).transpose(1, 2))
        scores = scores.view(items, num_kv_heads, num_rows, KEY_TILE)
        if hidden is not None:
            scores[first_hidden:].masked_fill_(hidden, HIDDEN_SCORE)
        weights = torch.softmax(scores, dim=-1)
        outputs = self.product(weights.view(flat[0], num_rows, KEY_TILE), values.view(flat))
        return TileResult(outputs.view(queries.shape), scores.amax(-1), weights.amax(-1))


def _unsafe_row_counts(head_dim: int) -> set[int]:
    """Row counts at which a row's bits are not those that it has in a large product."""
    generator = torch.Generator().manual_seed(head_dim)
    queries = torch.randn(24, MAX_QUERY_ROWS, head_dim, generator=generator)
    keys = torch.randn(24, KEY_TILE, head_dim, generator=generator)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    weights = torch.softmax(scores, dim=-1)
    outputs = torch.bmm(weights, keys)
    unsafe: set[int] = set()
    cases = product((*range(1, 33), 48, 64, 96), (1, 2, 3, 7, 24), (0, 1, 3))
    for count, items, first in cases:
        # From `first` on: a row's place in the product must not matter either.
        rows = slice(first, first + count)
        for is_single in (False, True):
            with single_thread(is_single):
                few_scores = torch.bmm(queries[:items, rows].clone(), keys[:items].transpose(1, 2))
                few_outputs = torch.bmm(weights[:items, rows].clone(), keys[:items])
            is_same = torch.equal(few_scores, scores[:items, rows])
            if not (is_same and torch.equal(few_outputs, outputs[:items, rows])):
                unsafe.add(count)
    return unsafe


def combine(result: TileResult, item_query: Tensor, rank_sizes: Sequence[int]) -> Tensor:
    """Join the tiles of each query tile -> [num_queries, num_kv_heads, rows, head_dim].

    Items come rank by rank: first the first key tile of every query, then the second of those that have two, and so
    on; queries are ordered by their number of tiles, most first. rank_sizes: queries in each rank; item_query: int64
    [items]. `result.outputs` is overwritten.
    """
    outputs, maxima, peaks = result
    largest, *later = maxima.split(rank_sizes)
    largest = largest.clone()
    for more in later:
        reached = largest[: len(more)]
        torch.maximum(reached, more, out=reached)
    shares = torch.exp(maxima - largest.index_select(0, item_query)) / peaks
    total = added_by_rank(outputs.mul_(shares.unsqueeze(-1)), rank_sizes)
    return total.div_(added_by_rank(shares, rank_sizes).unsqueeze(-1))


def added_by_rank(numbers: Tensor, rank_sizes: Sequence[int]) -> Tensor:
    """[items, ...] -> [num_queries, ...]: each query's items added one after the other, in ascending order."""
    total, *later = numbers.split(rank_sizes)
    total = total.clone()
    for more in later:
        total[: len(more)].add_(more)
    return total
