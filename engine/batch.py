"""What one step runs: the scheduler fills it, the runner reads it. Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .request import SamplingParams, TokenLogprob

NO_SLOT = -1
"""The token is run, but its K and V are not written (its block is shared)."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One token to draw from a request's last row. Several when n > 1 and the prompt has just ended."""

    sampling: SamplingParams
    choice: int
    position: int
    """Absolute position of the drawn token: with seed and choice it fixes the noise."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Ids sampled so far, for penalties."""
    is_eos_banned: bool = False
    """`min_tokens` not reached: end-of-turn and stop ids cannot be drawn."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens of one sequence that run in this step."""

    request_id: str
    token_ids: Sequence[int]
    """num_scheduled_tokens ids."""
    start_position: int
    """num_computed_tokens: absolute position of token_ids[0]."""
    block_table: Sequence[int]
    """Block ids for positions 0 .. start_position + len(token_ids) - 1, in order."""
    slot_mapping: Sequence[int]
    """Per token: block_id * block_size + offset, or NO_SLOT."""
    samples: Sequence[SampleSpec] = ()
    """Empty for a prefill chunk that is not the last."""


@dataclass(frozen=True, slots=True)
class Batch:
    sequences: Sequence[ScheduledSequence]
    block_copies: Sequence[tuple[int, int]] = ()
    """(source block id, destination block id), done before the forward pass."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One entry per sequence of the batch, in order."""

    token_ids: Sequence[int] = ()
    """One per SampleSpec, in order."""
    logprobs: Sequence[TokenLogprob | None] = ()
    error: str | None = None
    """Non-finite logits and the like: this sequence fails, its unpublished blocks are dropped."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    sequences: Sequence[SequenceResult] = field(default_factory=tuple)


class Runner(Protocol):
    """The model runner, or the exact integer runner of the tests."""

    def execute(self, batch: Batch) -> BatchResult: ...
