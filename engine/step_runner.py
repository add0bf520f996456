"""Steps on the runner: what was scheduled becomes a batch, and what it took is measured.

A runner that only executes gives a step's results at once. One that launches works while the next step is scheduled:

    engine   schedule 1  launch | schedule 2  launch | take 1  schedule 3  launch | take 2 ...
    device                      [ step 1             ][ step 2                   ][ step 3 ...
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from .batch import (
    NO_SLOT,
    Batch,
    BatchResult,
    OverlappedRunner,
    PendingResult,
    Runner,
    SampleSpec,
    ScheduledSequence,
    SequenceResult,
    pending_id,
)
from .budget import TokenBudget
from .config import BLOCK_SIZE
from .flight import FailedLaunch, Flight
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .scheduler import ScheduledTokens
from .sequence import SequenceState
from .tiers.load_planner import LoadPlanner

logger = logging.getLogger(__name__)


class FinishedStep(NamedTuple):
    """A step that is over, and what is to be taken from it."""

    scheduled: Sequence[ScheduledTokens]
    result: BatchResult


class StepRunner:
    """`runner`: with `launch`, steps overlap with their preparation."""

    def __init__(
        self,
        runner: Runner | OverlappedRunner,
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
        self._flights: deque[Flight] = deque()
        self._last_end_s = 0.0

    @property
    def is_flying(self) -> bool:
        return bool(self._flights)

    @property
    def must_land_first(self) -> bool:
        """The next step cannot be scheduled before the launched one is over."""
        return any(flight.must_land_first for flight in self._flights)

    def run(self, scheduled: Sequence[ScheduledTokens]) -> list[FinishedStep]:
        """Runs the step, or launches it and gives the one before; with nothing scheduled, what still flies. What the
        runner raises fails the requests of its batch; the engine goes on."""
        if not isinstance(self._runner, OverlappedRunner):
            return [self._execute(self._runner, scheduled)] if scheduled else []
        if scheduled:
            self._launch(self._runner, scheduled)
        return [self._land() for _ in range(len(self._flights) - bool(scheduled))]

    def land_all(self) -> list[FinishedStep]:
        """Waits for what was launched."""
        return [self._land() for _ in range(len(self._flights))]

    def abandon(self) -> None:
        """Waits for what was launched; nobody wants it."""
        for flight in self._flights:
            with suppress(Exception):
                flight.result.wait()
            self._kv.pool.end_step()
        self._flights.clear()

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """Raises AssertionError when sequences and launched steps disagree. `sequences`: all unfinished ones."""
        assert self._kv.pool.num_launched_steps == len(self._flights)
        num_tokens: Counter[SequenceState] = Counter()
        num_samples: Counter[SequenceState] = Counter()
        for flight in self._flights:
            for item, run in zip(flight.scheduled, flight.batch.sequences, strict=True):
                num_tokens[item.sequence] += item.num_tokens
                num_samples[item.sequence] += bool(run.samples)
        for sequence in sequences:
            assert sequence.num_flying_tokens == num_tokens[sequence], "tokens fly that no step computes, or more"
            assert sequence.num_flying_samples == num_samples[sequence], "ids fly that no step draws, or more"

    def _execute(self, runner: Runner, scheduled: Sequence[ScheduledTokens]) -> FinishedStep:
        batch = self._prepare(scheduled)
        start_s = self._clock()
        return FinishedStep(scheduled, self._take(batch, lambda: runner.execute(batch), start_s))

    def _launch(self, runner: OverlappedRunner, scheduled: Sequence[ScheduledTokens]) -> None:
        batch = self._prepare(scheduled)
        start_s = self._clock()
        result: PendingResult
        try:
            result = runner.launch(batch)
        except Exception as error:
            result = FailedLaunch(error)
        flight = Flight(scheduled, batch, result, start_s)
        self._flights.append(flight)
        self._kv.pool.begin_step()
        for item in scheduled:
            self._kv.finish_copy(item.sequence)
        flight.take_off()

    def _land(self) -> FinishedStep:
        flight = self._flights.popleft()
        result = self._take(flight.batch, flight.result.wait, max(flight.start_s, self._last_end_s))
        self._kv.pool.end_step()
        flight.land()
        return FinishedStep(flight.scheduled, result)

    def _take(self, batch: Batch, get_result: Callable[[], BatchResult], start_s: float) -> BatchResult:
        try:
            result = get_result()
            _check_result(batch, result)
        except Exception as error:
            logger.exception("the model runner failed")
            message = f"The model runner failed: {type(error).__name__}: {error}"
            return BatchResult([SequenceResult(error=message) for _ in batch.sequences])
        self._last_end_s = self._clock()
        self._measure(batch, self._last_end_s - start_s)
        return result

    def _prepare(self, scheduled: Sequence[ScheduledTokens]) -> Batch:
        sequences = [self._prepare_sequence(item) for item in scheduled]
        copies = [item.sequence.pending_copy for item in scheduled if item.sequence.pending_copy is not None]
        return Batch(sequences, copies)

    def _prepare_sequence(self, item: ScheduledTokens) -> ScheduledSequence:
        sequence = item.sequence
        start, stop = sequence.num_launched_tokens, sequence.num_launched_tokens + item.num_tokens
        token_ids = sequence.token_ids(start, stop)
        if stop > sequence.num_tokens:
            token_ids.append(pending_id(sequence.last_sample_index))
        return ScheduledSequence(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            start_position=start,
            block_table=tuple(sequence.block_table),
            slot_mapping=self._kv.slot_mapping(sequence, start, stop, NO_SLOT),
            samples=self._sample_specs(sequence) if item.is_sampling else (),
        )

    @staticmethod
    def _sample_specs(sequence: SequenceState) -> list[SampleSpec]:
        """The first token is drawn for all choices at once; from then on each has a sequence of its own."""
        request = sequence.request
        choices = range(request.n) if sequence.num_drawn_output_tokens == 0 else (sequence.choice,)
        return [
            SampleSpec(
                sampling=request.sampling,
                choice=choice,
                position=sequence.num_drawn_tokens,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=sequence.output_token_ids,
                is_eos_banned=sequence.num_drawn_output_tokens < request.sampling.min_tokens,
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
