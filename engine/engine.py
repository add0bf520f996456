"""The engine: requests go in, steps run, outputs come out. One thread at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from .batch import NO_SLOT, Batch, BatchResult, Runner, SampleSpec, ScheduledSequence, SequenceResult
from .block_hash import MAX_TOKEN_ID, BlockHasher
from .config import BLOCK_SIZE, EngineConfig
from .errors import InvalidRequestError, PromptTooLongError, QueueFullError
from .kv_cache import KVCacheManager
from .metrics import EngineCounters, EngineStats, take_stats
from .output_processor import OutputProcessor, TextStreamFactory
from .request import FinishReason, GenerationRequest, RequestOutput
from .scheduler import ScheduledTokens, Scheduler
from .sequence import ActiveRequest, SequenceState

logger = logging.getLogger(__name__)


class Engine:
    """Runs many requests on one runner.

    `new_text_stream`: without one, outputs carry ids and no text. `poison` (debugging): is told each block id whose
    content has just become meaningless. `clock`: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        hasher: BlockHasher,
        new_text_stream: TextStreamFactory | None,
        model_eos_ids: frozenset[int],
        *,
        poison: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self._runner = runner
        self._hasher = hasher
        self._new_text_stream = new_text_stream
        self._eos_ids = model_eos_ids
        self._poison = poison
        self._clock = clock
        self._num_arrivals = 0
        self.counters = EngineCounters()
        self.reset()

    def reset(self) -> None:
        """Forgets all requests, without outputs, and all blocks. Also the way out of a broken invariant: losing cached
        data is cheap, wrong data is not."""
        config = self.config
        self.kv = KVCacheManager(config.num_blocks, self._hasher, self._poison)
        self.scheduler = Scheduler(config, self.kv, self.counters)
        self._outputs = OutputProcessor(self._new_text_stream, self._eos_ids, self.max_context_tokens, self._clock)
        self._active: dict[str, ActiveRequest] = {}

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus answer of one request: the model's context, or what the whole pool holds."""
        return min(self.config.max_context_tokens, self.config.num_blocks * BLOCK_SIZE)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._active)

    def validate(self, request: GenerationRequest) -> None:
        """Raises InvalidRequestError or PromptTooLongError for what can never run. Any thread may ask."""
        token_ids = request.prompt_token_ids
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it must have at least one token", "messages")
        if len(token_ids) >= self.max_context_tokens:
            raise PromptTooLongError(len(token_ids), self.max_context_tokens)
        if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
            raise InvalidRequestError("the prompt has token ids outside of 0 .. 2**32 - 1", "prompt")
        if not 1 <= request.n <= self.config.max_num_seqs:
            raise InvalidRequestError(f"n must be between 1 and {self.config.max_num_seqs}, got {request.n}", "n")
        if request.request_id in self._active:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")

    def check_queue(self, num_more: int = 0) -> None:
        """Raises QueueFullError when no further request may wait; `num_more` wait elsewhere."""
        num_waiting = self.scheduler.num_waiting + num_more
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(num_waiting)

    def add_request(self, request: GenerationRequest) -> None:
        """Queues a request. Raises what `validate` and `check_queue` raise."""
        self.validate(request)
        self.check_queue()
        self._num_arrivals += 1
        active = ActiveRequest(request, self._num_arrivals)
        active.sequences.append(SequenceState(active, choice=0))
        self._active[request.request_id] = active
        self.scheduler.add(active.sequences[0])

    def cancel(self, request_id: str) -> list[RequestOutput]:
        """Frees the request's blocks now, whatever it was doing. One last output per unfinished choice; none if the
        request is unknown or has ended."""
        return self._end(request_id, FinishReason.CANCELLED, None)

    def step(self) -> list[RequestOutput]:
        """Runs one batch. Outputs are in the order of the batch, then the progress of those that wait or read."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        batch = self._prepare(scheduled)
        result = self._run(batch)
        outputs = self._update(scheduled, result)
        if self.config.check_integrity:
            self.scheduler.check_integrity()
        return outputs + self.report_progress()

    def report_progress(self) -> list[RequestOutput]:
        """Where waiting and reading requests stand, as far as it has changed since the last report."""
        return self._outputs.report_progress(self.scheduler.waiting, self.scheduler.running)

    def count_cached(self, prompt_token_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Tokens of a prompt that the device holds now. Touches nothing; any thread may ask."""
        return self.kv.count_cached(prompt_token_ids, cache_salt)

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
            slot_mapping=self.kv.slot_mapping(sequence, start, stop, NO_SLOT),
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

    def _run(self, batch: Batch) -> BatchResult:
        """What the runner raises fails the requests of this batch; the engine goes on."""
        start_s = self._clock()
        try:
            result = self._runner.execute(batch)
            _check_result(batch, result)
        except Exception as error:
            logger.exception("the model runner failed")
            message = f"The model runner failed: {type(error).__name__}: {error}"
            return BatchResult([SequenceResult(error=message) for _ in batch.sequences])
        duration_s = self._clock() - start_s
        self.scheduler.budget.record(batch.num_tokens, duration_s)
        self.counters.durations_s.append(duration_s)
        self.counters.num_steps += 1
        self.counters.last_batch_size = len(batch.sequences)
        return result

    def _update(self, scheduled: Sequence[ScheduledTokens], result: BatchResult) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for item, sequence_result in zip(scheduled, result.sequences, strict=True):
            sequence = item.sequence
            request_id = sequence.request.request_id
            if request_id not in self._active:
                continue  # another sequence of the same request has failed in this step
            if sequence_result.error is not None:
                self.counters.num_failed_requests += 1
                outputs += self._end(request_id, FinishReason.ERROR, sequence_result.error)
                continue
            self.kv.finish_copy(sequence)
            self.scheduler.advance(item)
            if sequence_result.token_ids:
                outputs += self._take_tokens(sequence, sequence_result)
        return outputs

    def _take_tokens(self, sequence: SequenceState, result: SequenceResult) -> list[RequestOutput]:
        is_forking = sequence.is_at_first_token and sequence.request.n > 1
        branches = self.scheduler.fork(sequence) if is_forking else [sequence]
        logprobs = result.logprobs or (None,) * len(branches)
        outputs = []
        for branch, token_id, logprob in zip(branches, result.token_ids, logprobs, strict=True):
            output = self._outputs.push(branch, token_id, logprob)
            self.counters.num_generated_tokens += 1
            if output.finish_reason is not None:
                self.scheduler.finish(branch)
            outputs.append(output)
        self._drop_if_finished(sequence.active)
        return outputs

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> list[RequestOutput]:
        active = self._active.get(request_id)
        if active is None:
            return []
        unstarted = self._outputs.end_unstarted(active, reason, error)
        outputs = []
        for sequence in list(active.sequences):
            outputs.append(self._outputs.end(sequence, reason, error))
            self.scheduler.finish(sequence)
        self._drop_if_finished(active)
        return outputs + unstarted

    def _drop_if_finished(self, active: ActiveRequest) -> None:
        if not active.sequences:
            del self._active[active.request.request_id]

    def stats(self) -> EngineStats:
        """On the engine's thread."""
        return take_stats(self.kv.pool, self.scheduler, self.counters)


def _check_result(batch: Batch, result: BatchResult) -> None:
    """Raises ValueError when the runner's answer does not fit the batch."""
    if len(result.sequences) != len(batch.sequences):
        raise ValueError(f"{len(batch.sequences)} sequences were run, {len(result.sequences)} came back")
    for sequence, sequence_result in zip(batch.sequences, result.sequences, strict=True):
        num_expected, num_tokens = len(sequence.samples), len(sequence_result.token_ids)
        if sequence_result.error is None and num_tokens != num_expected:
            raise ValueError(f"{num_expected} tokens were to be drawn, {num_tokens} came back")
