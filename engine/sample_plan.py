"""What a step's tokens are drawn with, made on the host and sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatkv.kernels.sampling_reference import noise
from chatkv.kernels.triton.draw_settings import DrawSettings, farthest_rank, scale_of
from chatkv.kernels.triton.logit_changes import LogitChanges

from .batch import SampleSpec
from .host_pack import send
from .sample_results import ResultLayout
from .token_history import TokenHistories

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
Words = NDArray[np.int32]

NONE = -1
"""As a row of changed logits or of masks: it has none."""


@dataclass(frozen=True)
class SamplePlan:
    """On the device, but for what `read` needs."""

    specs: tuple[SampleSpec, ...]
    settings: DrawSettings
    changes: LogitChanges | None
    """None: no row has penalties or biases."""
    logprob_rows: tuple[int, ...]
    """Which rows want logprobs."""
    logprob_drawn_rows: Tensor
    """int64 [L]: the same."""
    logprob_logit_rows: Tensor
    """int64 [L]: and their rows of the logits."""
    results: ResultLayout


@dataclass
class _Changes:
    """Of rows of logits, on the host."""

    logit_rows: list[int] = field(default_factory=list)
    token_ids: list[Ids] = field(default_factory=list)
    penalties: list[Values] = field(default_factory=list)
    subtracted: list[Values] = field(default_factory=list)


class SamplePlanner:
    """Used by one thread at a time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._histories = TokenHistories(vocab_size)
        # By id; neutral between calls.
        self._penalty_of: Values = np.ones(vocab_size)
        self._subtracted_of: Values = np.zeros(vocab_size)
        self._is_noted: NDArray[np.bool_] = np.zeros(vocab_size, np.bool_)

    def plan(
        self,
        specs: Sequence[SampleSpec],
        eos_ids: Collection[int],
        logit_rows: Sequence[int] | None = None,
        bitmask: Words | None = None,
    ) -> SamplePlan:
        """As `DeviceSampler.prepare`."""
        sources = range(len(specs)) if logit_rows is None else logit_rows
        if len(sources) != len(specs):
            raise ValueError(f"{len(sources)} rows of logits for {len(specs)} tokens")
        num_words = -(-self._vocab_size // 32)
        if bitmask is not None and bitmask.shape != (len(specs), num_words):
            raise ValueError(f"a bitmask of {bitmask.shape} for {len(specs)} tokens of {num_words} words")
        numbers = np.empty((len(specs), 5), np.int32)
        factors = np.empty((len(specs), 3), np.float64)
        changes = _Changes()
        masks: list[Words] = []
        for row, (spec, source) in enumerate(zip(specs, sources, strict=True)):
            mask = self._mask(spec, eos_ids, None if bitmask is None else bitmask[row])
            has_changes = self._change(spec, source, changes)
            changed_row = len(changes.logit_rows) - 1 if has_changes else NONE
            mask_row = NONE if mask is None else len(masks)
            if mask is not None:
                masks.append(mask)
            top_k, top_p, min_p = self._filters(spec)
            sampling = spec.sampling
            uniform = 0.0 if sampling.is_greedy else noise(sampling.seed, spec.choice, spec.position)
            numbers[row] = source, changed_row, mask_row, top_k, farthest_rank(min_p)
            factors[row] = np.float32(scale_of(sampling.temperature)), top_p, uniform
        wanted = [row for row, spec in enumerate(specs) if spec.sampling.num_logprobs is not None]
        num_top = max((specs[row].sampling.num_logprobs or 0 for row in wanted), default=0)
        numbers_sent, factors_sent, masks_sent, drawn_rows, logprob_logit_rows, *changes_sent = send(
            [
                numbers,
                factors,
                np.stack(masks) if masks else np.empty((0, num_words), np.int32),
                np.array(wanted, np.int64),
                np.array([sources[row] for row in wanted], np.int64),
                *_changes_arrays(changes),
            ],
            self._device,
        )
        return SamplePlan(
            specs=tuple(specs),
            settings=DrawSettings(
                numbers_sent,
                factors_sent,
                masks_sent,
                has_top_k=bool((numbers[:, 3] > 0).any()),
                has_top_p=bool((factors[:, 1] < 1.0).any()),
                has_min_p=bool((numbers[:, 4] < farthest_rank(0.0)).any()),
            ),
            changes=LogitChanges(*changes_sent) if changes.logit_rows else None,
            logprob_rows=tuple(wanted),
            logprob_drawn_rows=drawn_rows,
            logprob_logit_rows=logprob_logit_rows,
            results=ResultLayout(len(specs), len(wanted), min(num_top, self._vocab_size)),
        )

    def _filters(self, spec: SampleSpec) -> tuple[int, float, float]:
        """top-k, top-p, min-p; each off where it filters nothing."""
        sampling = spec.sampling
        if sampling.is_greedy:
            return 0, 1.0, 0.0
        return sampling.top_k if sampling.top_k < self._vocab_size else 0, sampling.top_p, sampling.min_p

    def _mask(self, spec: SampleSpec, eos_ids: Collection[int], allowed: Words | None) -> Words | None:
        """None: every id may be drawn."""
        banned = {*eos_ids, *spec.sampling.stop_token_ids} if spec.is_eos_banned else set()
        banned_ids = np.array([token_id for token_id in banned if 0 <= token_id < self._vocab_size], np.int64)
        if not len(banned_ids):
            return None if allowed is None or bool((allowed == -1).all()) else allowed
        mask = np.full(-(-self._vocab_size // 32), -1, np.int32) if allowed is None else allowed.copy()
        np.bitwise_and.at(mask, banned_ids // 32, ~np.left_shift(np.uint32(1), banned_ids % 32).astype(np.int32))
        return mask

    def _change(self, spec: SampleSpec, source: int, changes: _Changes) -> bool:
        """Adds the row's penalties and biases, one entry an id. False: it has none."""
        sampling = spec.sampling
        touched: list[Ids] = []
        if sampling.repetition_penalty != 1.0:
            seen = self._histories.of(spec).seen()
            touched.append(seen.ids)
            self._penalty_of[seen.ids] = sampling.repetition_penalty
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            written = self._histories.of(spec).written()
            touched.append(written.ids)
            self._subtracted_of[written.ids] = sampling.frequency_penalty * written.counts + sampling.presence_penalty
        biased = [token_id for token_id in sampling.logit_bias if 0 <= token_id < self._vocab_size]
        if biased:
            touched.append(np.array(biased, np.int64))
            self._subtracted_of[touched[-1]] -= [sampling.logit_bias[token_id] for token_id in biased]
        if not touched:
            return False
        ids = np.concatenate([self._not_noted(part) for part in touched])
        changes.logit_rows.append(source)
        changes.token_ids.append(ids)
        changes.penalties.append(self._penalty_of[ids])
        changes.subtracted.append(self._subtracted_of[ids])
        self._penalty_of[ids] = 1.0
        self._subtracted_of[ids] = 0.0
        self._is_noted[ids] = False
        return True

    def _not_noted(self, ids: Ids) -> Ids:
        """Those that come for the first time, now noted. ids: different ones."""
        new: Ids = ids[~self._is_noted[ids]]
        self._is_noted[new] = True
        return new


def _changes_arrays(changes: _Changes) -> list[NDArray[np.int64] | NDArray[np.int32] | Values]:
    """The fields of `LogitChanges`."""
    lengths = [len(ids) for ids in changes.token_ids]
    return [
        np.array(changes.logit_rows, np.int64),
        np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        np.concatenate([np.empty(0, np.int64), *changes.token_ids]).astype(np.int32),
        np.concatenate([np.empty(0), *changes.penalties]),
        np.concatenate([np.empty(0), *changes.subtracted]),
    ]
