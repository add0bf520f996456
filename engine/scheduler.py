"""Who runs how many tokens in the next step. There is no prefill phase and no decode phase: each sequence is given
tokens so that its computed tokens catch up with its tokens.

Order within a step: foreground before background; in each, decode tokens of running sequences, then admissions, then
prefill chunks. Decodes always run, so a pasted book never freezes another chat; prefills share what the budget leaves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .block_tree import BlockNode
from .budget import TokenBudget
from .config import BLOCK_SIZE, EngineConfig
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .request import Priority, RequestStatus
from .sequence import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """The next `num_tokens` uncomputed tokens of a sequence; its blocks are allocated."""

    sequence: SequenceState
    num_tokens: int

    @property
    def is_sampling(self) -> bool:
        """The chunk ends with the last known token: its row gives the next one."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class StepPlan:
    """What has been given away in this step so far."""

    budget: int
    chunks: dict[SequenceState, int] = field(default_factory=dict)
    """Scheduled tokens per sequence, in order."""

    @property
    def num_left(self) -> int:
        return self.budget - sum(self.chunks.values())


class Scheduler:
    """Owns the waiting and the running sequences; both lists are between steps what `Engine` sees."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, counters: EngineCounters) -> None:
        self.budget = TokenBudget(config.max_num_batched_tokens, config.target_step_s)
        self.waiting: list[SequenceState] = []
        """Sorted by `order`; preempted ones keep their arrival and so stand ahead of those that came later."""
        self.running: list[SequenceState] = []
        """In order of admission."""
        self._config = config
        self._kv = kv
        self._counters = counters
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have not been admitted yet; preempted ones do not count against the bound of the queue."""
        return sum(sequence.status is RequestStatus.WAITING for sequence in self.waiting)

    def add(self, sequence: SequenceState) -> None:
        insort(self.waiting, sequence, key=lambda other: other.order)

    def schedule(self) -> list[ScheduledTokens]:
        """Allocates blocks for the next step. Empty only when nothing is unfinished."""
        plan = StepPlan(self.budget.num_tokens)
        for is_background in (False, True):
            if is_background and self._has_foreground():
                plan.budget -= max(plan.num_left - BLOCK_SIZE, 0)  # a side job may slow a chat by one small chunk only
            self._schedule_decodes(plan, is_background)
            self._admit(plan, is_background)
            self._schedule_prefills(plan, is_background)
        for sequence in sorted(plan.chunks, key=plan.chunks.__getitem__):  # who got less is served first next time
            self._num_turns += 1
            sequence.last_turn = self._num_turns
        assert plan.chunks or not (self.running or self.waiting), "the scheduler is stuck"
        return [ScheduledTokens(sequence, num_tokens) for sequence, num_tokens in plan.chunks.items()]

    def advance(self, scheduled: ScheduledTokens) -> None:
        """The tokens were computed: blocks that became full are published."""
        sequence = scheduled.sequence
        start = sequence.num_computed_tokens
        stop = start + scheduled.num_tokens
        self._counters.num_computed_prompt_tokens += max(min(stop, sequence.num_prompt_tokens) - start, 0)
        sequence.num_computed_tokens = stop
        sequence.active.read_up_to(min(stop, sequence.num_prompt_tokens))
        self._kv.publish(sequence)

    def fork(self, parent: SequenceState) -> list[SequenceState]:
        """One sequence for each choice, the parent first. Called when the prompt is computed, before the first tokens
        are appended. A fork that finds no room waits like a preempted sequence; its prompt is cached."""
        active = parent.active
        for choice in range(1, active.request.n):
            child = SequenceState(active, choice, block_hashes=list(parent.block_hashes), last_turn=parent.last_turn)
            active.sequences.append(child)
            if len(self.running) < self._config.max_num_seqs and self._kv.fork(parent, child):
                child.status = RequestStatus.RUNNING
                self.running.append(child)
            else:
                child.status = RequestStatus.PREEMPTED
                self.add(child)
        return list(active.sequences)

    def finish(self, sequence: SequenceState) -> None:
        """Gives everything back, whatever the sequence was doing: waiting, reading or writing."""
        if sequence.status is RequestStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._kv.free(sequence)
        sequence.status = RequestStatus.FINISHED
        sequence.active.sequences.remove(sequence)

    def _schedule_decodes(self, plan: StepPlan, is_background: bool) -> None:
        """One token each, oldest first: those that may be preempted for a block come last."""
        decoding = [s for s in self._running(is_background) if s.num_uncomputed_tokens == 1]
        for sequence in sorted(decoding, key=lambda s: s.order):
            if is_background and plan.num_left < 1:
                return
            self._give(plan, sequence, 1)

    def _admit(self, plan: StepPlan, is_background: bool) -> None:
        """Waiting sequences by priority and age. A sequence that does not fit holds back all behind it, so that it is
        not overtaken for ever; one whose next block another is computing steps aside until that block is published."""
        for sequence in list(self.waiting):
            if _is_background(sequence) != is_background:
                return  # sorted by priority: either the background begins here, or the foreground still waits for room
            hits = self._kv.longest_hit(sequence)
            if self._is_computed_elsewhere(sequence, hits):
                continue
            if not is_background:
                self._preempt_background_for(sequence, hits, plan)
            if not self._has_room(sequence, hits):
                return
            self.waiting.remove(sequence)
            self._start(sequence, hits)

    def _start(self, sequence: SequenceState, hits: list[BlockNode]) -> None:
        active = sequence.active
        if not active.is_admitted:
            active.miss = self._kv.explain_miss(sequence, hits)
            self._counters.num_prefix_query_tokens += active.num_prompt_tokens
        self._take_hits(sequence, hits)
        active.is_admitted = True
        sequence.status = RequestStatus.RUNNING
        sequence.last_turn = 0
        self.running.append(sequence)

    def _take_hits(self, sequence: SequenceState, hits: list[BlockNode]) -> None:
        self._kv.take_hits(sequence, hits)
        if sequence.is_at_first_token:
            num_new = sequence.active.read_up_to(sequence.num_computed_tokens)
            sequence.active.num_cached_tokens += num_new
            self._counters.num_prefix_hit_tokens += num_new

    def _schedule_prefills(self, plan: StepPlan, is_background: bool) -> None:
        """Equal shares of what is left, in whole blocks, for those that have waited longest. The foreground gets at
        least one block however many decodes run."""
        if not is_background:
            plan.budget += max(BLOCK_SIZE - plan.num_left, 0)
        pending = [s for s in self._running(is_background) if s not in plan.chunks]
        pending.sort(key=lambda s: (s.last_turn, s.order))
        for index, sequence in enumerate(pending):
            if sequence.status is not RequestStatus.RUNNING:
                continue
            if len(sequence.block_table) == len(sequence.nodes):
                self._take_hits(sequence, self._kv.longest_hit(sequence))
            num_sharing = len(pending) - index
            share = -(-plan.num_left // (num_sharing * BLOCK_SIZE)) * BLOCK_SIZE
            num_tokens = _chunk(sequence, min(share, plan.num_left))
            if num_tokens > 0:
                self._give(plan, sequence, num_tokens)

    def _give(self, plan: StepPlan, sequence: SequenceState, num_tokens: int) -> None:
        """Schedules the tokens, preempting the newest sequence of the lowest priority while their blocks are missing;
        that may be this sequence itself."""
        while sequence.status is RequestStatus.RUNNING:
            if self._kv.allocate(sequence, num_tokens):
                plan.chunks[sequence] = num_tokens
                return
            self._preempt(max(self.running, key=lambda s: s.order), plan)

    def _preempt(self, victim: SequenceState, plan: StepPlan) -> None:
        """Its full blocks stay cached; it comes back with the same ids and draws the same noise."""
        plan.chunks.pop(victim, None)
        self.running.remove(victim)
        self._kv.free(victim)
        victim.status = RequestStatus.PREEMPTED
        self.add(victim)
        self._counters.num_preemptions += 1

    def _preempt_background_for(self, sequence: SequenceState, hits: list[BlockNode], plan: StepPlan) -> None:
        while not self._has_room(sequence, hits) and (background := self._running(is_background=True)):
            self._preempt(max(background, key=lambda s: s.order), plan)

    def _has_room(self, sequence: SequenceState, hits: list[BlockNode]) -> bool:
        """The whole sequence fits beside what running ones still need for the tokens known today, with a block to grow
        for each of them: else an admission would only lead to a preemption."""
        num_committed = sum(other.num_blocks_ahead + 1 for other in self.running)
        num_needed = self._kv.num_blocks_needed(sequence, hits)
        return len(self.running) < self._config.max_num_seqs and num_needed + num_committed <= self._kv.pool.num_free

    def _is_computed_elsewhere(self, sequence: SequenceState, hits: list[BlockNode]) -> bool:
        """A running sequence of no lower priority is about to publish the block that comes next. Were the two blocks
        different ones of equal hash, the wait would be for nothing but would end all the same."""
        index = len(hits)
        if index >= sequence.num_tokens // BLOCK_SIZE:
            return False
        block_hash = self._kv.block_hash(sequence, index)
        return any(
            other.priority <= sequence.priority
            and len(other.nodes) <= index < other.num_tokens // BLOCK_SIZE
            and self._kv.block_hash(other, index) == block_hash
            for other in self.running
        )

    def _running(self, is_background: bool) -> list[SequenceState]:
        return [sequence for sequence in self.running if _is_background(sequence) == is_background]

    def _has_foreground(self) -> bool:
        return any(not _is_background(sequence) for sequence in self.running)

    def sequences(self) -> Iterator[SequenceState]:
        yield from self.running
        yield from self.waiting

    def check_integrity(self) -> None:
        """Raises AssertionError when lists, statuses and blocks disagree."""
        for sequence in self.running:
            assert sequence.status is RequestStatus.RUNNING
        for sequence in self.waiting:
            assert sequence.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not sequence.block_table, "a waiting sequence holds blocks"
            assert sequence.pending_copy is None, "a waiting sequence holds the source of a copy"
        assert _is_sorted(self.waiting), "the waiting queue is out of order"
        assert len(self.running) <= self._config.max_num_seqs
        self._kv.check_integrity(self.sequences())


def _chunk(sequence: SequenceState, share: int) -> int:
    """Tokens of the next prefill chunk: all that is left, or up to the last block boundary that the share reaches.
    0 for less than a block: then others run first."""
    if sequence.num_uncomputed_tokens <= share:
        return sequence.num_uncomputed_tokens
    start = sequence.num_computed_tokens
    stop = (start + share) // BLOCK_SIZE * BLOCK_SIZE
    return max(stop - start, 0)


def _is_background(sequence: SequenceState) -> bool:
    return sequence.priority is Priority.BACKGROUND


def _is_sorted(sequences: Sequence[SequenceState]) -> bool:
    return all(a.order < b.order for a, b in pairwise(sequences))
