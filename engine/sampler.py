"""Draws the next token of each row. The steps and their order are those of `kernels/sampling_reference.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from chatkv.kernels.sampling_reference import noise

from .batch import SampleSpec
from .draw import Ids, Row, Weights, draw, largest
from .quick_draw import quick_draw
from .request import TokenLogprob
from .token_history import TokenHistories


class Sampler:
    """Works row by row: a row's token is the same alone and in any company. Used by one thread at a time."""

    def __init__(self, vocab_size: int):
        """`vocab_size`: columns beyond it belong to no token and are never drawn."""
        self._vocab_size = vocab_size
        self._histories = TokenHistories(vocab_size)

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: Collection[int]
    ) -> list[tuple[int, TokenLogprob | None]]:
        """logits: float32 [len(specs), vocab or more], left as it is. One (token id, logprob if asked for) a row.

        Raises ValueError on rows without a finite highest logit: the runner fails such requests before.
        """
        if logits.ndim != 2 or logits.shape[0] != len(specs) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits {tuple(logits.shape)} do not fit {len(specs)} rows of {self._vocab_size} tokens")
        rows: Row = logits[:, : self._vocab_size].detach().float().cpu().numpy()
        return [self._sample_row(row, spec, eos_ids) for row, spec in zip(rows, specs, strict=True)]

    def _sample_row(self, row: Row, spec: SampleSpec, eos_ids: Collection[int]) -> tuple[int, TokenLogprob | None]:
        sampling = spec.sampling
        if not np.isfinite(row.max()):
            raise ValueError("a row of logits has no finite maximum")
        adjusted = self._adjust(row, spec, eos_ids)
        if sampling.is_greedy:
            token_id = int(adjusted.argmax())  # The first of equals.
        else:
            uniform = noise(sampling.seed, spec.choice, spec.position)
            quick = quick_draw(adjusted, sampling, uniform)
            token_id = draw(adjusted, sampling, uniform) if quick is None else quick
        logprob = None if sampling.num_logprobs is None else _logprob(row, token_id, sampling.num_logprobs)
        return token_id, logprob

    def _adjust(self, row: Row, spec: SampleSpec, eos_ids: Collection[int]) -> Row | Weights:
        """Penalties, bias, bans: the row itself where none applies, else a float64 copy. [vocab]"""
        sampling = spec.sampling
        has_penalty = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        banned_ids = {*eos_ids, *sampling.stop_token_ids} if spec.is_eos_banned else ()
        if not (has_penalty or sampling.repetition_penalty != 1.0 or sampling.logit_bias or banned_ids):
            return row
        logits = row.astype(np.float64)
        if sampling.repetition_penalty != 1.0:
            seen = self._histories.of(spec).seen().ids
            values, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if has_penalty:
            written = self._histories.of(spec).written()
            logits[written.ids] -= sampling.frequency_penalty * written.counts + sampling.presence_penalty
        for token_id, bias in sampling.logit_bias.items():
            if 0 <= token_id < len(logits):
                logits[token_id] += bias
        if banned_ids:
            banned = np.array([token_id for token_id in banned_ids if 0 <= token_id < len(logits)], np.int64)
            before = logits[banned]
            logits[banned] = -np.inf
            if logits.max() == -np.inf:  # Nothing else is left.
                logits[banned] = before
        return logits


def _logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution: before penalties, bias, temperature and filters."""
    logits = row.astype(np.float64)
    best = logits.max()
    log_sum = best + np.log(np.exp(logits - best).sum())
    top: Ids = largest(row, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-row[top], kind="stable")]
    return TokenLogprob(
        token_id=token_id,
        logprob=float(logits[token_id] - log_sum),
        top=tuple((int(other), float(logits[other] - log_sum)) for other in top),
    )
