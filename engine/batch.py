"""What one step runs: the scheduler fills it, the runner reads it. Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .request import SamplingParams, TokenLogprob

NO_SLOT = -1
"""The token is run, but its K and V are not written (its block is shared)."""


def pending_id(sample_index: int) -> int:
    """Stands for the token that the step launched just before draws as its sample `sample_index`, counted over all
    `SampleSpec`s of that batch in order. The other way round: sample_index = -1 - id. That token is one of the
    vocabulary even where that step's sequence has failed: its row here is run for nothing, and harms nobody."""
    return -1 - sample_index


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One token to draw from a request's last row. Several when n > 1 and the prompt has just ended."""

    sampling: SamplingParams
    choice: int
    position: int
    """Absolute position of the drawn token: with seed and choice it fixes the noise."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Ids sampled so far, for penalties. Behind a pending id they lack the last one, but never when
    `sampling.needs_history`. They grow later: read them during `execute` or `launch` only."""
    is_eos_banned: bool = False
    """`min_tokens` not reached: end-of-turn and stop ids cannot be drawn."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens of one sequence that run in this step."""

    request_id: str
    token_ids: Sequence[int]
    """num_scheduled_tokens ids. One below zero, always the last, stands for an id that only the device knows so far:
    `pending_id`."""
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


class PendingResult(Protocol):
    """A step that was launched."""

    def is_ready(self) -> bool:
        """`wait` would return, or raise, at once."""
        ...

    def wait(self) -> BatchResult:
        """Called once. Returns, or raises, only when the device is done with the step: from then on the blocks that it
        read and wrote are used for other things. What it raises fails the requests of this step."""
        ...


@runtime_checkable
class OverlappedRunner(Protocol):
    """A runner whose device works by itself: the next step is launched while the last one runs."""

    def launch(self, batch: Batch) -> PendingResult:
        """Queues the step and returns. Steps run in the order of launches, at most two are not waited for at any time,
        and results are asked for in the same order. A launch that raises fails the requests of its batch, and nothing
        of it may still run on the device then."""
        ...
