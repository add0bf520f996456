"""Where each unfinished sequence stands: waiting for room, waiting for its blocks, or running."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import pairwise

from .request import Priority, RequestStatus
from .sequence import SequenceState


class Queues:
    def __init__(self) -> None:
        self.waiting: list[SequenceState] = []
        """Sorted by `order`; preempted ones keep their arrival and so stand ahead of those that came later."""
        self.loading: list[SequenceState] = []
        """In order of admission."""
        self.running: list[SequenceState] = []
        """In order of admission."""

    @property
    def num_waiting(self) -> int:
        """Sequences that have not been admitted yet; preempted ones do not count against the bound of the queue."""
        return sum(sequence.status is RequestStatus.WAITING for sequence in self.waiting)

    @property
    def admitted(self) -> list[SequenceState]:
        return self.running + self.loading

    def wait(self, sequence: SequenceState, status: RequestStatus) -> None:
        sequence.status = status
        insort(self.waiting, sequence, key=lambda other: other.order)

    def load(self, sequence: SequenceState) -> None:
        sequence.status = RequestStatus.LOADING
        self.loading.append(sequence)

    def run(self, sequence: SequenceState) -> None:
        sequence.status = RequestStatus.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        match sequence.status:
            case RequestStatus.RUNNING:
                self.running.remove(sequence)
            case RequestStatus.LOADING:
                self.loading.remove(sequence)
            case _:
                self.waiting.remove(sequence)

    def is_running_foreground(self) -> bool:
        return any(not is_background(sequence) for sequence in self.running)

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.loading
        yield from self.waiting

    def check_integrity(self) -> None:
        """Raises AssertionError when lists and statuses disagree."""
        assert all(sequence.status is RequestStatus.RUNNING for sequence in self.running)
        assert all(sequence.status is RequestStatus.LOADING for sequence in self.loading)
        for sequence in self.waiting:
            assert sequence.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.pending_copy is None, "a waiting sequence holds the source of a copy"
        assert all(a.order < b.order for a, b in pairwise(self.waiting)), "the waiting queue is out of order"


def is_background(sequence: SequenceState) -> bool:
    return sequence.priority is Priority.BACKGROUND
