"""What the engine says of itself. Cheap to take after every step; how it is shown is the service's business."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .block_pool import BlockPool
from .config import BLOCK_SIZE
from .sequence import SequenceState
from .tiers.tier import TierStats

if TYPE_CHECKING:
    from .scheduler import Scheduler

NUM_DURATIONS_KEPT = 256


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    num_prefix_query_tokens: int = 0
    """Prompt tokens of admitted requests."""
    num_hit_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    """Those of them that blocks held, by where the blocks lay."""
    num_computed_prompt_tokens: int = 0
    """With those that a preemption made compute again."""
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_failed_requests: int = 0
    last_batch_size: int = 0
    """Sequences in the last step; 0 once the engine is idle."""
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_DURATIONS_KEPT))
    """The latest steps."""

    def count_hit(self, sequence: SequenceState, tier_name: str) -> None:
        """The sequence has come to hold blocks that lay there. Work in advance is no hit; nor is what a preemption
        makes read again."""
        if sequence.is_at_first_token:
            num_new = sequence.active.count_cached(sequence.num_computed_tokens, tier_name)
            if num_new and sequence.warm is None:
                self.num_hit_tokens_by_tier[tier_name] += num_new


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment. num_used + num_cached + num_free = num_blocks."""

    num_running: int
    num_waiting: int
    """Queued, and preempted ones that will come back."""
    batch_size: int
    num_blocks: int
    num_used: int
    """Blocks that running and loading sequences hold."""
    num_cached: int
    """Blocks that nobody holds, kept for the next hit."""
    num_free: int
    """Blank blocks."""
    unused_slot_share: float
    """Slots without a token in held blocks / slots of held blocks."""
    token_budget: int
    num_steps: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_computed_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_failed_requests: int
    step_p50_s: float
    step_p99_s: float
    num_loading: int = 0
    """Requests that wait for blocks from a lower tier."""
    num_hit_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    """"device", "host", "disk" -> tokens; sums up to `num_prefix_hit_tokens`."""
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
    """The lower tiers."""

    @property
    def kv_usage(self) -> float:
        """0..1: share of the pool that running sequences hold."""
        return self.num_used / self.num_blocks


def take_stats(pool: BlockPool, scheduler: Scheduler, counters: EngineCounters) -> EngineStats:
    """A snapshot; on the engine's thread, between steps."""
    durations = sorted(counters.durations_s)
    num_held_slots = pool.num_used * BLOCK_SIZE
    num_unused_slots = sum(sequence.num_unused_slots for sequence in scheduler.running)
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_loading=len(scheduler.loading),
        batch_size=counters.last_batch_size if scheduler.running else 0,
        num_blocks=pool.num_blocks,
        num_used=pool.num_used,
        num_cached=pool.num_cached_free,
        num_free=pool.num_free - pool.num_cached_free,
        unused_slot_share=num_unused_slots / num_held_slots if num_held_slots else 0.0,
        token_budget=scheduler.budget.num_tokens,
        num_steps=counters.num_steps,
        num_prefix_query_tokens=counters.num_prefix_query_tokens,
        num_prefix_hit_tokens=sum(counters.num_hit_tokens_by_tier.values()),
        num_hit_tokens_by_tier=dict(counters.num_hit_tokens_by_tier),
        num_computed_prompt_tokens=counters.num_computed_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=counters.num_preemptions,
        num_failed_requests=counters.num_failed_requests,
        step_p50_s=percentile(durations, 0.5),
        step_p99_s=percentile(durations, 0.99),
    )


def percentile(sorted_values: list[float], share: float) -> float:
    """Nearest rank; 0 without values."""
    if not sorted_values:
        return 0.0
    return sorted_values[min(int(share * len(sorted_values)), len(sorted_values) - 1)]
