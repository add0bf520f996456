"""Who runs how many tokens in the next step. There is no prefill phase and no decode phase: each sequence is given
tokens so that its computed tokens catch up with its tokens.

Order within a step: foreground before background; in each, decode tokens of running sequences, then admissions, then
prefill chunks. Decodes always run, so a pasted book never freezes another chat; prefills share what the budget leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .admission import Admission
from .budget import TokenBudget
from .config import BLOCK_SIZE, EngineConfig
from .kv_cache import KVCacheManager
from .loads import LoadSet
from .metrics import EngineCounters
from .queues import Queues, is_background
from .request import RequestStatus, WarmMode
from .sequence import SequenceState
from .tiers.load_planner import LoadPlanner
from .tiers.tier_manager import TierManager


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """The next `num_tokens` uncomputed tokens of a sequence; its blocks are allocated."""

    sequence: SequenceState
    num_tokens: int

    @property
    def is_sampling(self) -> bool:
        """The chunk ends with the last token: its row gives the next one. Not to be asked once the step is launched."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens and self.sequence.warm is None


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
    """Moves sequences between the queues. `clock`: seconds, monotonic."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        tiers: TierManager,
        loads: LoadSet,
        planner: LoadPlanner,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self.budget = TokenBudget(config.max_num_batched_tokens, config.target_step_s)
        self.queues = Queues()
        self._config = config
        self._kv = kv
        self._loads = loads
        self._counters = counters
        self._admission = Admission(config, self.queues, kv, tiers, loads, planner, counters, clock)
        self._num_turns = 0

    @property
    def waiting(self) -> list[SequenceState]:
        return self.queues.waiting

    @property
    def loading(self) -> list[SequenceState]:
        return self.queues.loading

    @property
    def running(self) -> list[SequenceState]:
        return self.queues.running

    def add(self, sequence: SequenceState) -> None:
        self.queues.wait(sequence, RequestStatus.WAITING)

    def take_loaded(self, budget_bytes: int) -> None:
        """Copies what lower tiers have brought. Who has got all of it, or all that there will be, runs."""
        for sequence in self._loads.advance(sorted(self.loading, key=lambda s: s.order), budget_bytes):
            self.queues.remove(sequence)
            self.queues.run(sequence)
            sequence.is_done = sequence.warm is WarmMode.LOAD or (
                sequence.warm is not None and sequence.num_uncomputed_tokens == 0
            )

    def schedule(self) -> list[ScheduledTokens]:
        """Allocates blocks for the next step. Empty only when nothing is unfinished but what waits for loads or for a
        launched step, and what is done."""
        plan = StepPlan(self.budget.num_tokens)
        self._admission.begin()
        for is_background_turn in (False, True):
            if is_background_turn and self.queues.is_running_foreground():
                plan.budget -= max(plan.num_left - BLOCK_SIZE, 0)  # a side job may slow a chat by one small chunk only
            self._schedule_decodes(plan, is_background_turn)
            self._admission.admit(is_background_turn, lambda victim: self._try_to_preempt(victim, plan))
            self._schedule_prefills(plan, is_background_turn)
        for sequence in sorted(plan.chunks, key=plan.chunks.__getitem__):  # who got less is served first next time
            self._num_turns += 1
            sequence.last_turn = self._num_turns
        is_waiting = self.loading or self._admission.waits_until_s is not None or not self._kv.pool.is_settled
        is_over = not (self.running or self.waiting) or self.take_done()
        assert plan.chunks or is_waiting or is_over, "the scheduler is stuck"
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
            if len(self.queues.admitted) < self._config.max_num_seqs and self._kv.fork(parent, child):
                self.queues.run(child)
            else:
                self.queues.wait(child, RequestStatus.PREEMPTED)
        return list(active.sequences)

    def finish(self, sequence: SequenceState) -> None:
        """Gives everything back, whatever the sequence was doing: waiting, loading, reading or writing."""
        if sequence.status is RequestStatus.LOADING:
            self._loads.cancel(sequence)
        self.queues.remove(sequence)
        self._kv.free(sequence)
        sequence.status = RequestStatus.FINISHED
        sequence.active.sequences.remove(sequence)

    def take_done(self) -> list[SequenceState]:
        """Warm sequences that have nothing left to do; the caller finishes them."""
        return [sequence for sequence in self.queues if sequence.is_done]

    def _schedule_decodes(self, plan: StepPlan, is_background_turn: bool) -> None:
        """One token each, oldest first: those that may be preempted for a block come last."""
        decoding = [s for s in self._running(is_background_turn) if s.num_uncomputed_tokens == 1]
        for sequence in sorted(decoding, key=lambda s: s.order):
            if is_background_turn and plan.num_left < 1:
                return
            self._give(plan, sequence, 1)

    def _schedule_prefills(self, plan: StepPlan, is_background_turn: bool) -> None:
        """Equal shares of what is left, in whole blocks, for those that have waited longest. The foreground gets at
        least one block however many decodes run."""
        if not is_background_turn:
            plan.budget += max(BLOCK_SIZE - plan.num_left, 0)
        pending = [s for s in self._running(is_background_turn) if s not in plan.chunks]
        pending.sort(key=lambda s: (s.last_turn, s.order))
        for index, sequence in enumerate(pending):
            if sequence.status is not RequestStatus.RUNNING:
                continue
            if len(sequence.block_table) == len(sequence.nodes) and not sequence.num_flying_tokens:
                self._admission.take_device_hits(sequence)
                sequence.is_done = sequence.num_uncomputed_tokens == 0
            num_sharing = len(pending) - index
            share = -(-plan.num_left // (num_sharing * BLOCK_SIZE)) * BLOCK_SIZE
            num_tokens = _chunk(sequence, min(share, plan.num_left))
            if num_tokens > 0:
                self._give(plan, sequence, num_tokens)

    def _give(self, plan: StepPlan, sequence: SequenceState, num_tokens: int) -> None:
        """Schedules the tokens, preempting the newest sequence of the lowest priority while their blocks are missing;
        that may be this sequence itself."""
        if sequence.warm:
            num_new = self._kv.num_new_blocks(sequence, num_tokens)
            num_tokens = min(num_tokens, self._admission.num_blocks_for_warm(sequence, num_new) * BLOCK_SIZE)
            if num_tokens == 0:
                sequence.is_done = not self._admission.wait_for_blocks()
                return
        while sequence.status is RequestStatus.RUNNING:
            if self._kv.allocate(sequence, num_tokens):
                plan.chunks[sequence] = num_tokens
                return
            if not self._try_to_preempt(max(self.queues.admitted, key=lambda s: s.order), plan):
                return

    def _try_to_preempt(self, victim: SequenceState, plan: StepPlan) -> bool:
        """False: waiting may bring blocks, and preempting would bring none before that. Its full blocks stay cached;
        it comes back with the same ids and draws the same noise."""
        if self._admission.wait_for_blocks():
            return False
        assert not victim.num_flying_tokens, "a launched step works on it"
        plan.chunks.pop(victim, None)
        if victim.status is RequestStatus.LOADING:
            self._loads.cancel(victim)
        self.queues.remove(victim)
        self._kv.free(victim)
        self.queues.wait(victim, RequestStatus.PREEMPTED)
        self._counters.num_preemptions += 1
        return True

    def _running(self, is_background_turn: bool) -> list[SequenceState]:
        return [s for s in self.running if is_background(s) == is_background_turn and not (s.is_done or s.is_ending)]

    @property
    def must_settle(self) -> bool:
        """Some sequence went short of blocks that launched steps and copies keep: nothing is scheduled before they are
        over."""
        return self._admission.must_settle

    @property
    def waits_until_s(self) -> float | None:
        """By the clock: when there is something to decide even if no tier reports anything."""
        times = (self._loads.stalls_at_s, self._admission.waits_until_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def check_integrity(self, copied_block_ids: Iterable[int] = ()) -> None:
        """Raises AssertionError when lists, statuses and blocks disagree. `copied_block_ids`: held by copies to lower
        tiers."""
        self.queues.check_integrity()
        assert len(self.queues.admitted) <= self._config.max_num_seqs
        self._kv.check_integrity(self.queues, [*self._loads.reserved_block_ids(), *copied_block_ids])


def _chunk(sequence: SequenceState, share: int) -> int:
    """Tokens of the next prefill chunk: all that is left, or up to the last block boundary that the share reaches.
    0 for less than a block: then others run first."""
    if sequence.num_uncomputed_tokens <= share:
        return sequence.num_uncomputed_tokens
    start = sequence.num_launched_tokens
    stop = (start + share) // BLOCK_SIZE * BLOCK_SIZE
    return max(stop - start, 0)
