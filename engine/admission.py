"""Who may begin: sequences leave the waiting queue for a load or for the batch when all that they need fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .block_tree import BlockNode
from .config import EngineConfig
from .kv_cache import Hit, KVCacheManager
from .loads import LoadSet
from .metrics import EngineCounters
from .queues import Queues, is_background
from .request import LoadDecision, WarmMode
from .sequence import SequenceState
from .tiers.load_planner import LoadPlanner
from .tiers.tier_manager import TierManager

Preempt = Callable[[SequenceState], bool]
"""False: not before launched steps are over."""

PATIENCE_S = 0.5
"""For blocks that have left the device before they were safe below: a disk needs less, computing them often more."""


class Admission:
    """`clock`: seconds, the one by which the pool knows when blocks were used."""

    def __init__(
        self,
        config: EngineConfig,
        queues: Queues,
        kv: KVCacheManager,
        tiers: TierManager,
        loads: LoadSet,
        planner: LoadPlanner,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._queues = queues
        self._kv = kv
        self._tiers = tiers
        self._loads = loads
        self._planner = planner
        self._counters = counters
        self._clock = clock
        self.waits_until_s: float | None = None
        """By the clock: when the first of those that wait for queued blocks stops waiting."""
        self.must_settle = False
        """Launched steps and copies keep blocks that somebody lacks."""

    def begin(self) -> None:
        """Before each step."""
        self.waits_until_s = None
        self.must_settle = False

    def wait_for_blocks(self) -> bool:
        """For who lacks blocks. True: launched steps and copies keep some, and the next step is not scheduled before
        they are over. False: no waiting helps."""
        self.must_settle = self.must_settle or not self._kv.pool.is_settled
        return self.must_settle

    def admit(self, is_background_turn: bool, preempt: Preempt) -> None:
        """Waiting sequences by priority and age. A sequence that does not fit holds back all behind it, so that it is
        not overtaken for ever; one whose next block is being computed or loaded for another steps aside until that
        block is published."""
        for sequence in list(self._queues.waiting):
            if is_background(sequence) != is_background_turn:
                return  # sorted by priority: either the background begins here, or the foreground still waits for room
            if sequence.is_done or self._is_on_its_way(sequence, len(self._kv.device_hit(sequence))):
                continue
            hit = self._kv.longest_hit(sequence)
            if hit.is_queued and self._waits_for_queue(sequence):
                continue
            if sequence.warm:
                if not self._has_seat():
                    return
                self._admit_warm(sequence, hit)
                continue
            if not is_background_turn:
                self._make_room(sequence, hit.device, preempt)
            if not self._has_room(sequence, hit.device):
                return
            self._start(sequence, hit)

    def take_device_hits(self, sequence: SequenceState) -> None:
        """A running sequence stands at the end of a block: others may have published what comes next."""
        self._take(sequence, self._kv.device_hit(sequence))

    def num_blocks_for_warm(self, sequence: SequenceState, num_wanted: int, kept: Sequence[BlockNode] = ()) -> int:
        """Blocks that work in advance may take: nobody needs them soon, and nobody has used them lately."""
        used_before_s = self._clock() - self._config.warm_keep_s
        num_evictable = self._kv.pool.num_evictable(num_wanted, kept, used_before_s)
        num_spare = self._kv.pool.num_free - self._kv.num_free_hits(kept) - self._num_committed(sequence)
        return max(min(num_evictable, num_spare), 0)

    def _waits_for_queue(self, sequence: SequenceState) -> bool:
        now_s = self._clock()
        if sequence.waits_until_s is None:
            sequence.waits_until_s = now_s + PATIENCE_S
            self._tiers.hurry()
        if now_s >= sequence.waits_until_s:
            return False
        self.waits_until_s = min(self.waits_until_s or sequence.waits_until_s, sequence.waits_until_s)
        return True

    def _start(self, sequence: SequenceState, hit: Hit) -> None:
        active = sequence.active
        decision = self._planner.decide(hit.lower) if hit.lower else None
        if not active.is_admitted:
            active.miss = self._kv.explain_miss(sequence, hit.nodes)
            active.load = decision
            self._counters.num_prefix_query_tokens += active.num_prompt_tokens
        self._begin(sequence, hit, hit.lower, decision)

    def _admit_warm(self, sequence: SequenceState, hit: Hit) -> None:
        """It takes what room there is, and is done at once when there is none or nothing to do."""
        active = sequence.active
        decision = self._planner.decide(hit.lower) if hit.lower else None
        wanted = hit.lower if decision is not None and decision.is_loaded else []
        num_missing = sequence.num_full_blocks - len(hit.device) - len(wanted)
        can_compute = sequence.warm is WarmMode.COMPUTE and num_missing > 0
        num_room = self.num_blocks_for_warm(sequence, max(len(wanted), 1), hit.device) if wanted or can_compute else 0
        if num_room == 0:
            sequence.is_done = not ((wanted or can_compute) and self.wait_for_blocks())
            return
        if not active.is_admitted:
            active.load = decision
        self._begin(sequence, hit, wanted[:num_room], decision)

    def _begin(self, sequence: SequenceState, hit: Hit, wanted: list[BlockNode], decision: LoadDecision | None) -> None:
        self._queues.remove(sequence)
        self._tiers.touch(hit.nodes)
        self._take(sequence, hit.device)
        sequence.active.is_admitted = True
        sequence.last_turn = 0
        if wanted and decision is not None and decision.is_loaded:
            self._loads.start(sequence, wanted, decision)
            self._queues.load(sequence)
        else:
            self._queues.run(sequence)

    def _take(self, sequence: SequenceState, hits: list[BlockNode]) -> None:
        self._kv.take_hits(sequence, hits)
        self._counters.count_hit(sequence, "device")

    def _make_room(self, sequence: SequenceState, hits: list[BlockNode], preempt: Preempt) -> None:
        """Work in the background gives way."""
        while not self._has_room(sequence, hits):
            victims = [other for other in self._queues.admitted if is_background(other)]
            if not victims:
                return
            if not preempt(max(victims, key=lambda other: other.order)):
                return

    def _has_room(self, sequence: SequenceState, hits: list[BlockNode]) -> bool:
        """The whole sequence fits beside what the admitted ones still need for the tokens known today, with a block to
        grow for each of them: else an admission would only lead to a preemption."""
        if not self._has_seat():
            return False
        num_needed = self._kv.num_blocks_needed(sequence, hits)
        return num_needed + self._num_committed(sequence) <= self._kv.pool.num_free

    def _has_seat(self) -> bool:
        return len(self._queues.admitted) < self._config.max_num_seqs

    def _num_committed(self, besides: SequenceState) -> int:
        """Free blocks that admitted sequences will take; what loads have reserved is not free any more."""
        return sum(
            other.num_blocks_ahead - self._loads.num_reserved(other) + 1
            for other in self._queues.admitted
            if other is not besides
        )

    def _is_on_its_way(self, sequence: SequenceState, index: int) -> bool:
        """Another one is about to publish block `index`: it loads it, or computes it with no lower priority. Were the
        two blocks different ones of equal hash, the wait would be for nothing but would end all the same."""
        if index >= sequence.num_full_blocks:
            return False
        block_hash = self._kv.block_hash(sequence, index)
        return any(
            len(other.nodes) <= index < other.num_full_blocks
            and self._kv.block_hash(other, index) == block_hash
            and (self._loads.brings(other, index) or self._will_compute(other, sequence))
            for other in self._queues.admitted
        )

    @staticmethod
    def _will_compute(other: SequenceState, sequence: SequenceState) -> bool:
        return other.priority <= sequence.priority and other.warm is not WarmMode.LOAD
