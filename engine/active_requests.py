"""The unfinished requests: what steps bring them, and how they end."""

from __future__ import annotations

from .batch import SequenceResult
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .output_processor import OutputProcessor
from .request import FinishReason, RequestOutput, RequestStatus
from .scheduler import Scheduler
from .sequence import ActiveRequest, SequenceState
from .step_runner import FinishedStep


class ActiveRequests:
    def __init__(
        self, kv: KVCacheManager, scheduler: Scheduler, outputs: OutputProcessor, counters: EngineCounters
    ) -> None:
        self.by_id: dict[str, ActiveRequest] = {}
        self._kv = kv
        self._scheduler = scheduler
        self._outputs = outputs
        self._counters = counters

    def take(self, step: FinishedStep) -> list[RequestOutput]:
        """What a step has brought, in the order of its batch."""
        outputs: list[RequestOutput] = []
        for item, result in zip(step.scheduled, step.result.sequences, strict=True):
            sequence = item.sequence
            if sequence.status is RequestStatus.FINISHED:
                continue  # since the launch, or because another sequence of its request has failed in this step
            if result.error is not None:
                self._counters.num_failed_requests += 1
                outputs += self.end(sequence.request.request_id, FinishReason.ERROR, result.error)
                continue
            self._kv.finish_copy(sequence)
            self._scheduler.advance(item)
            if sequence.warm and sequence.num_computed_tokens == sequence.num_tokens:
                sequence.is_done = True
                outputs += self.end_done()
            if result.token_ids:
                outputs += self._take_tokens(sequence, result)
        return outputs

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[RequestOutput]:
        """One last output per unfinished choice; none if the request is unknown or has ended."""
        active = self.by_id.get(request_id)
        if active is None:
            return []
        unstarted = self._outputs.end_unstarted(active, reason, error)
        outputs = []
        for sequence in list(active.sequences):
            outputs.append(self._outputs.end(sequence, reason, error))
            self._scheduler.finish(sequence)
        self._drop_if_finished(active)
        return outputs + unstarted

    def end_done(self) -> list[RequestOutput]:
        """Warm requests that have done what they could."""
        done = [sequence.request.request_id for sequence in self._scheduler.take_done()]
        return [output for request_id in done for output in self.end(request_id, FinishReason.STOP)]

    def _take_tokens(self, sequence: SequenceState, result: SequenceResult) -> list[RequestOutput]:
        is_forking = sequence.is_at_first_token and sequence.request.n > 1
        branches = self._scheduler.fork(sequence) if is_forking else [sequence]
        logprobs = result.logprobs or (None,) * len(branches)
        outputs = []
        for branch, token_id, logprob in zip(branches, result.token_ids, logprobs, strict=True):
            output = self._outputs.push(branch, token_id, logprob)
            self._counters.num_generated_tokens += 1
            if output.finish_reason is not None:
                self._scheduler.finish(branch)
            outputs.append(output)
        self._drop_if_finished(sequence.active)
        return outputs

    def _drop_if_finished(self, active: ActiveRequest) -> None:
        if not active.sequences:
            del self.by_id[active.request.request_id]
