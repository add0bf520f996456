"""Draws the next token of each row. The steps and their order are those of `kernels/sampling_reference.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from chatkv.kernels.sampling_reference import noise

from .batch import SampleSpec
from .request import SamplingParams, TokenLogprob

Row = NDArray[np.float32]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]

_BUCKET_SHIFT = 45
_ONE_BITS = int(np.float64(1.0).view(np.int64)) >> _BUCKET_SHIFT
_NUM_BUCKETS = 4096
"""128 for each halving, down to 2**-32; smaller weights share the last."""


class Sampler:
    """Works row by row in float64: a row's token is the same alone and in any company."""

    def __init__(self, vocab_size: int):
        """`vocab_size`: columns beyond it belong to no token and are never drawn."""
        self._vocab_size = vocab_size

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: Collection[int]
    ) -> list[tuple[int, TokenLogprob | None]]:
        """logits: float32 [len(specs), vocab or more], left as it is. One (token id, logprob if asked for) a row.

        Raises ValueError on rows without a finite highest logit: the runner fails such requests before.
        """
        if logits.ndim != 2 or logits.shape[0] != len(specs) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(specs)} rows of {self._vocab_size} tokens")
        rows: Row = logits[:, : self._vocab_size].detach().float().cpu().numpy()
        return [_sample_row(row, spec, eos_ids) for row, spec in zip(rows, specs, strict=True)]


def _sample_row(row: Row, spec: SampleSpec, eos_ids: Collection[int]) -> tuple[int, TokenLogprob | None]:
    sampling = spec.sampling
    if not np.isfinite(row.max()):
        raise ValueError("a row of logits has no finite maximum")
    adjusted = _adjust(row, spec, eos_ids)
    if sampling.is_greedy:
        token_id = int(adjusted.argmax())  # The first of equals.
    else:
        token_id = _draw(adjusted, sampling, noise(sampling.seed, spec.choice, spec.position))
    logprob = None if sampling.num_logprobs is None else _logprob(row, token_id, sampling.num_logprobs)
    return token_id, logprob


def _adjust(row: Row, spec: SampleSpec, eos_ids: Collection[int]) -> Row | Weights:
    """Penalties, bias, bans: the row itself where none applies, else a float64 copy. [vocab]"""
    sampling = spec.sampling
    has_penalty = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    banned_ids = {*eos_ids, *sampling.stop_token_ids} if spec.is_eos_banned else ()
    if not (has_penalty or sampling.repetition_penalty != 1.0 or sampling.logit_bias or banned_ids):
        return row
    logits = row.astype(np.float64)
    if sampling.repetition_penalty != 1.0:
        seen = _known_ids([*spec.prompt_token_ids, *spec.output_token_ids], len(logits))
        values, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if has_penalty:
        written, counts = np.unique(_known_ids(spec.output_token_ids, len(logits), unique=False), return_counts=True)
        logits[written] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token_id, bias in sampling.logit_bias.items():
        if 0 <= token_id < len(logits):
            logits[token_id] += bias
    if banned_ids:
        banned = _known_ids(list(banned_ids), len(logits))
        before = logits[banned]
        logits[banned] = -np.inf
        if logits.max() == -np.inf:  # Nothing else is left.
            logits[banned] = before
    return logits


def _draw(logits: Row | Weights, sampling: SamplingParams, uniform: float) -> int:
    with np.errstate(over="ignore"):  # A tiny temperature makes all but the best impossible.
        scaled = (logits.astype(np.float64) - np.float64(logits.max())) / sampling.temperature
    weights = np.exp(scaled)  # The best is 1.
    ids = _kept_ids(weights, sampling)
    kept = weights if ids is None else weights[ids]
    cumulative = np.cumsum(kept)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index == len(kept):  # Rounding reached the end.
        index = int(np.flatnonzero(kept)[-1])
    return index if ids is None else int(ids[index])


def _kept_ids(weights: Weights, sampling: SamplingParams) -> Ids | None:
    """Ids that pass top-k, top-p and min-p, ascending; None: all."""
    ids: Ids | None = None
    if 0 < sampling.top_k < len(weights):
        ids = _largest(weights, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = weights if ids is None else weights[ids]
        inner = _nucleus(kept, sampling.top_p)
        ids = inner if ids is None else ids[inner]
    if sampling.min_p > 0.0:
        ids = np.flatnonzero(weights >= sampling.min_p) if ids is None else ids[weights[ids] >= sampling.min_p]
    return ids


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Indices of the fewest largest weights whose sum reaches top_p of all, ascending. weights: [n], in [0, 1].

    Only the weights near the border are sorted: buckets by the leading bits of a float64 (exponent and 7 bits of
    mantissa), which grow with it, say which those are.
    """
    buckets = np.minimum(_ONE_BITS - (weights.view(np.int64) >> _BUCKET_SHIFT), _NUM_BUCKETS - 1)
    sums = np.cumsum(np.bincount(buckets, weights, _NUM_BUCKETS))
    enough = top_p * sums[-1]
    bucket = int(np.searchsorted(sums, enough, side="left"))
    num_before = int(np.count_nonzero(buckets < bucket))
    descending = np.sort(weights[buckets == bucket])[::-1]
    sum_before = sums[bucket - 1] if bucket else 0.0
    num_inside = int(np.searchsorted(sum_before + np.cumsum(descending), enough, side="left")) + 1
    num_inside = min(num_inside, len(descending))  # Sums in another order may round to less than enough.
    return _at_border(weights, float(descending[num_inside - 1]), num_before + num_inside)


def _largest(values: NDArray[np.floating], num: int) -> Ids:
    """Indices of the `num` largest values, ascending; among equals at the border the first."""
    if num >= len(values):
        return np.arange(len(values))
    return _at_border(values, float(np.partition(values, len(values) - num)[len(values) - num]), num)


def _at_border(values: NDArray[np.floating], border: float, num: int) -> Ids:
    """Indices of all values above the border, and of the first at the border, `num` together."""
    ids = np.flatnonzero(values >= border)
    num_too_many = len(ids) - num
    if num_too_many > 0:
        at_border = np.flatnonzero(values[ids] == border)
        ids = np.delete(ids, at_border[len(at_border) - num_too_many :])
    return ids


def _logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution: before penalties, bias, temperature and filters."""
    logits = row.astype(np.float64)
    best = logits.max()
    log_sum = best + np.log(np.exp(logits - best).sum())
    top = _largest(row, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-row[top], kind="stable")]
    return TokenLogprob(
        token_id=token_id,
        logprob=float(logits[token_id] - log_sum),
        top=tuple((int(other), float(logits[other] - log_sum)) for other in top),
    )


def _known_ids(token_ids: Sequence[int], vocab_size: int, unique: bool = True) -> Ids:
    ids = np.asarray(token_ids, np.int64)
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    return np.unique(ids) if unique else ids
