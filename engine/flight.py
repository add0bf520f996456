"""A step that was launched and is not over: its sequences are ahead of what is known of them until it lands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .batch import Batch, BatchResult, PendingResult
from .request import RequestStatus
from .scheduler import ScheduledTokens


@dataclass(frozen=True, slots=True)
class Flight:
    scheduled: Sequence[ScheduledTokens]
    batch: Batch
    result: PendingResult
    start_s: float
    """By the engine's clock."""

    @property
    def must_land_first(self) -> bool:
        """No step can be prepared before its ids are known: the next draw depends on them, the choices part, or there
        will be none."""
        return isinstance(self.result, FailedLaunch) or any(
            len(run.samples) > 1 or (run.samples and item.sequence.request.sampling.needs_history)
            for item, run in zip(self.scheduled, self.batch.sequences, strict=True)
        )

    def take_off(self) -> None:
        """The step is launched: the next one goes on behind it."""
        num_samples = 0
        for item, run in zip(self.scheduled, self.batch.sequences, strict=True):
            sequence = item.sequence
            sequence.num_flying_tokens += item.num_tokens
            if run.samples:
                sequence.num_flying_samples += 1
                sequence.last_sample_index = num_samples
                num_samples += len(run.samples)

    def land(self) -> None:
        """The step is over; what it brought is yet to be taken. Sequences that have ended in the air stay as they are:
        nobody takes their results."""
        for item, run in zip(self.scheduled, self.batch.sequences, strict=True):
            sequence = item.sequence
            if sequence.status is RequestStatus.FINISHED:
                continue
            assert sequence.status is RequestStatus.RUNNING, "a sequence was taken out of the batch in the air"
            sequence.num_flying_tokens -= item.num_tokens
            sequence.num_flying_samples -= bool(run.samples)


class FailedLaunch:
    """The `PendingResult` of a launch that raised: its failure comes when its turn to land has come, behind the results
    of the step before."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_ready(self) -> bool:
        return True

    def wait(self) -> BatchResult:
        raise self._error
