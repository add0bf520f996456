"""Draws tokens where the logits are: `prepare` on the host, `launch` on the device, `read` when the copy has come back.

The steps are those of kernels/sampling_reference.py; kernels/triton/sampling.py says how near float32 comes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatkv.kernels.triton.logit_changes import change_logits
from chatkv.kernels.triton.logprobs import raw_logprobs
from chatkv.kernels.triton.sampling import draw_tokens

from .batch import SampleSpec
from .request import SamplingParams, TokenLogprob
from .sample_plan import SamplePlan, SamplePlanner
from .sample_results import ResultLayout


@dataclass(frozen=True)
class SampledRows:
    """On the device, perhaps still to be computed."""

    packed: Tensor
    """int32: all results. A copy of it on the host is for `DeviceSampler.read`."""
    results: ResultLayout

    @property
    def token_ids(self) -> Tensor:
        """int32 [R]"""
        return self.results.views(self.packed).token_ids

    @property
    def are_finite(self) -> Tensor:
        """int32 [R]: 1 where every logit of the row is."""
        return self.results.views(self.packed).are_finite


class DrawnToken(NamedTuple):
    token_id: int
    is_finite: bool
    """False: some logit of the row is not; the request must fail."""
    logprob: TokenLogprob | None
    """None: not asked for."""


class DeviceSampler:
    """Works row by row: a row's token is the same alone and in any company. Used by one thread at a time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """`vocab_size`: columns beyond it belong to no token and are never drawn."""
        self._vocab_size = vocab_size
        self._device = device
        self._planner = SamplePlanner(vocab_size, device)

    def prepare(
        self,
        specs: Sequence[SampleSpec],
        eos_ids: Collection[int],
        logit_rows: Sequence[int] | None = None,
        bitmask: NDArray[np.int32] | None = None,
    ) -> SamplePlan:
        """Does not wait for the device.

        logit_rows: which row of the logits each token is drawn from, several perhaps from one; by default one each.
        bitmask: int32 [len(specs), ceil(vocab_size / 32)], bit id % 32 of word id // 32 is 1 where a grammar allows the
        id. What it and `is_eos_banned` leave empty counts as not banned.
        """
        return self._planner.plan(specs, eos_ids, logit_rows, bitmask)

    def warm_up(self, logits: Tensor) -> None:
        """Compiles every kernel of `launch` for such logits, by one token with all settings at once."""
        sampling = SamplingParams(top_k=1, top_p=0.5, min_p=0.1, presence_penalty=1.0, num_logprobs=1)
        self.launch(logits, self.prepare([SampleSpec(sampling, 0, 0, (0,), (0,), is_eos_banned=True)], (0,), [0]))

    def launch(self, logits: Tensor, plan: SamplePlan) -> SampledRows:
        """logits: float32 [rows, vocab_size or more], left as they are. Queues kernels on the current stream."""
        changes = plan.changes
        changed = logits.new_empty((0, self._vocab_size))
        if changes is not None:
            changed = change_logits(logits, changes, self._vocab_size)
        packed = plan.results.new(self._device)
        views = plan.results.views(packed)
        draw_tokens(logits, changed, plan.settings, self._vocab_size, views.token_ids, views.are_finite)
        if plan.logprob_rows:
            raw_logprobs(
                logits,
                plan.logprob_logit_rows,
                plan.logprob_drawn_rows,
                views.token_ids,
                self._vocab_size,
                views.drawn_logprobs,
                views.top_ids,
                views.top_logprobs,
            )
        return SampledRows(packed, plan.results)

    def read(self, packed: Tensor, plan: SamplePlan) -> list[DrawnToken]:
        """packed: a copy of `SampledRows.packed` on the host. One entry a spec, in order."""
        views = plan.results.views(packed)
        logprobs = dict(zip(plan.logprob_rows, _read_logprobs(packed, plan), strict=True))
        return [
            DrawnToken(token_id, bool(is_finite), logprobs.get(row))
            for row, (token_id, is_finite) in enumerate(
                zip(views.token_ids.tolist(), views.are_finite.tolist(), strict=True)
            )
        ]


def _read_logprobs(packed: Tensor, plan: SamplePlan) -> list[TokenLogprob]:
    views = plan.results.views(packed)
    token_ids, drawn = views.token_ids.tolist(), views.drawn_logprobs.tolist()
    top_ids, top_logprobs = views.top_ids.tolist(), views.top_logprobs.tolist()
    found: list[TokenLogprob] = []
    for index, row in enumerate(plan.logprob_rows):
        num_top = plan.specs[row].sampling.num_logprobs or 0
        top = tuple(zip(top_ids[index][:num_top], top_logprobs[index][:num_top], strict=True))
        found.append(TokenLogprob(token_ids[row], drawn[index], top))
    return found
