"""One step on the runner: what was scheduled becomes a batch, and what it took is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from .batch import NO_SLOT, Batch, BatchResult, Runner, SampleSpec, ScheduledSequence, SequenceResult
from .budget import TokenBudget
from .config import BLOCK_SIZE
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .scheduler import ScheduledTokens
from .sequence import SequenceState
from .tiers.load_planner import LoadPlanner

logger = logging.getLogger(__name__)


class StepRunner:
    def __init__(
        self,
        runner: Runner,
        kv: KVCacheManager,
        budget: TokenBudget,
        planner: LoadPlanner,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._budget = budget
        self._planner = planner
        self._counters = counters
        self._clock = clock

    def run(self, scheduled: Sequence[ScheduledTokens]) -> BatchResult:
        """What the runner raises fails the requests of this batch; the engine goes on."""
        batch = self._prepare(scheduled)
        start_s = self._clock()
        try:
            result = self._runner.execute(batch)
            _check_result(batch, result)
        except Exception as error:
            logger.exception("the model runner failed")
            message = f"The model runner failed: {type(error).__name__}: {error}"
            return BatchResult([SequenceResult(error=message) for _ in batch.sequences])
        self._measure(batch, self._clock() - start_s)
        return result

    def _prepare(self, scheduled: Sequence[ScheduledTokens]) -> Batch:
        sequences = [self._prepare_sequence(item) for item in scheduled]
        copies = [item.sequence.pending_copy for item in scheduled if item.sequence.pending_copy is not None]
        return Batch(sequences, copies)

    def _prepare_sequence(self, item: ScheduledTokens) -> ScheduledSequence:
        sequence = item.sequence
        start, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + item.num_tokens
        return ScheduledSequence(
            request_id=sequence.request.request_id,
            token_ids=sequence.token_ids(start, stop),
            start_position=start,
            block_table=tuple(sequence.block_table),
            slot_mapping=self._kv.slot_mapping(sequence, start, stop, NO_SLOT),
            samples=self._sample_specs(sequence) if item.is_sampling else (),
        )

    @staticmethod
    def _sample_specs(sequence: SequenceState) -> list[SampleSpec]:
        """The first token is drawn for all choices at once; from then on each has a sequence of its own."""
        request = sequence.request
        choices = range(request.n) if sequence.is_at_first_token else (sequence.choice,)
        return [
            SampleSpec(
                sampling=request.sampling,
                choice=choice,
                position=sequence.num_tokens,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=sequence.output_token_ids,
                is_eos_banned=len(sequence.output_token_ids) < request.sampling.min_tokens,
            )
            for choice in choices
        ]

    def _measure(self, batch: Batch, duration_s: float) -> None:
        self._budget.record(batch.num_tokens, duration_s)
        self._counters.durations_s.append(duration_s)
        self._counters.num_steps += 1
        self._counters.last_batch_size = len(batch.sequences)
        chunks = [sequence for sequence in batch.sequences if len(sequence.token_ids) >= BLOCK_SIZE]
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if num_tokens * 2 > batch.num_tokens:  # a step that mostly read prompts tells what reading costs
            centres = (len(chunk.token_ids) * (chunk.start_position + len(chunk.token_ids) / 2) for chunk in chunks)
            self._planner.record_step(num_tokens, sum(centres) / num_tokens, duration_s)


def _check_result(batch: Batch, result: BatchResult) -> None:
    """Raises ValueError when the runner's answer does not fit the batch."""
    if len(result.sequences) != len(batch.sequences):
        raise ValueError(f"{len(batch.sequences)} sequences were run, {len(result.sequences)} came back")
    for sequence, sequence_result in zip(batch.sequences, result.sequences, strict=True):
        num_expected, num_tokens = len(sequence.samples), len(sequence_result.token_ids)
        if sequence_result.error is None and num_tokens != num_expected:
            raise ValueError(f"{num_expected} tokens were to be drawn, {num_tokens} came back")
