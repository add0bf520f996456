"""Blocks on their way from a lower tier to the device. The sequence that asked for them waits, the batch goes on.

Device blocks are reserved at the start. Images are copied into them here alone: on the engine's thread, between steps,
for a load that lives. So nothing can be written into the pool after a cancel or a deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .block_tree import BlockNode
from .config import BLOCK_SIZE
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .request import LoadDecision
from .sequence import SequenceState
from .tiers.tier import BlockImages
from .tiers.tier_manager import LoadPart, TierManager

STALL_S = 2.0
"""When nothing has come for so long, neither for a load nor for another one that may have the tier's buffers, the load
is given up, and the rest is computed."""
DEADLINE_S = 60.0
"""Of a whole load. One that stalls ends long before."""


@dataclass(slots=True, eq=False)
class Load:
    sequence: SequenceState
    nodes: Sequence[BlockNode]
    """What it was to bring."""
    decision: LoadDecision
    parts: deque[LoadPart]
    block_ids: deque[int]
    """Reserved, and nothing is in them yet."""
    start_s: float
    ready: deque[memoryview] = field(default_factory=deque)
    """Images of the first part that were taken and are yet to be copied."""
    num_left_in_part: int = 0

    @property
    def num_placed(self) -> int:
        return len(self.nodes) - len(self.block_ids)


class LoadSet:
    """`images`: None where there is no lower tier."""

    def __init__(
        self,
        kv: KVCacheManager,
        tiers: TierManager,
        images: BlockImages | None,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._tiers = tiers
        self._images = images
        self._counters = counters
        self._clock = clock
        self._loads: dict[SequenceState, Load] = {}
        self._progress_s = clock()
        """When something came last, for whomever."""

    def start(self, sequence: SequenceState, nodes: Sequence[BlockNode], decision: LoadDecision) -> None:
        """Reserves a device block for each node; the caller knows that they fit. The sequence holds all blocks before
        them."""
        assert nodes[0].position == len(sequence.nodes), "a load continues what the sequence holds"
        block_ids = self._kv.pool.allocate(len(nodes))
        parts = self._tiers.start_load(nodes, DEADLINE_S)
        load = Load(sequence, list(nodes), decision, deque(parts), deque(block_ids), self._clock())
        load.num_left_in_part = parts[0].num_blocks
        self._loads[sequence] = load

    def advance(self, sequences: Sequence[SequenceState], budget_bytes: int) -> list[SequenceState]:
        """Copies what has come, up to about `budget_bytes`, for those first that stand first. Returns the sequences
        whose load has ended: they hold all of it, or its leading part."""
        ended = []
        for sequence in sequences:
            load = self._loads[sequence]
            num_before = load.num_placed
            is_ended = self._copy_ready(load, budget_bytes)
            if num_copied := load.num_placed - num_before:
                budget_bytes -= num_copied * self._image_bytes
                self._progress_s = self._clock()
            if is_ended or (not self.has_ready and self._clock() > self._stalls_at_s(load)):
                self.cancel(sequence)
                ended.append(sequence)
        return ended

    def cancel(self, sequence: SequenceState) -> None:
        """What was placed stays with the sequence, the other reserved blocks are free. Nothing more is written."""
        load = self._loads.pop(sequence)
        _stop(load)
        self._kv.pool.free(list(load.block_ids), is_used=False)
        active = sequence.active
        if active.load is load.decision:
            active.load = replace(load.decision, num_loaded_tokens=load.num_placed * BLOCK_SIZE)

    def abandon(self) -> None:
        """The engine starts anew: pool and sequences are gone."""
        for load in self._loads.values():
            _stop(load)
        self._loads.clear()

    @property
    def has_ready(self) -> bool:
        """Images that have come wait to be copied."""
        return any(load.ready for load in self._loads.values())

    @property
    def stalls_at_s(self) -> float | None:
        """By the clock: when the first load is given up unless something comes."""
        return min((self._stalls_at_s(load) for load in self._loads.values()), default=None)

    def num_reserved(self, sequence: SequenceState) -> int:
        """Blocks that its load holds beside the sequence's own."""
        return len(self._loads[sequence].block_ids) if sequence in self._loads else 0

    def brings(self, sequence: SequenceState, index: int) -> bool:
        """Block `index` of the sequence is on its way."""
        load = self._loads.get(sequence)
        return load is not None and 0 <= index - len(sequence.nodes) < len(load.block_ids)

    def nodes(self) -> Iterator[BlockNode]:
        for load in self._loads.values():
            yield from load.nodes

    def reserved_block_ids(self) -> Iterator[int]:
        for load in self._loads.values():
            yield from load.block_ids

    @property
    def _image_bytes(self) -> int:
        assert self._images is not None
        return self._images.image_bytes

    def _stalls_at_s(self, load: Load) -> float:
        return max(load.start_s, self._progress_s) + STALL_S

    def _copy_ready(self, load: Load, budget_bytes: int) -> bool:
        """True when nothing more will come."""
        while load.parts:
            job = load.parts[0].job
            load.ready.extend(job.take())
            if not load.ready:
                if not job.is_done:
                    return False
                if load.num_left_in_part:
                    return True
                load.parts.popleft()
                load.num_left_in_part = load.parts[0].num_blocks if load.parts else 0
                continue
            while load.ready:
                if budget_bytes <= 0:
                    return False
                self._place(load)
                budget_bytes -= self._image_bytes
        return True

    def _place(self, load: Load) -> None:
        part, sequence = load.parts[0], load.sequence
        assert self._images is not None
        assert load.num_left_in_part > 0, "a tier gave more than it was asked for"
        image = load.ready.popleft()
        block_id = load.block_ids.popleft()
        self._images.write(block_id, image)
        part.job.release(image)
        load.num_left_in_part -= 1
        self._kv.place_loaded(sequence, block_id)
        self._counters.count_hit(sequence, part.tier_name)


def _stop(load: Load) -> None:
    for image in load.ready:
        load.parts[0].job.release(image)
    load.ready.clear()
    for part in load.parts:
        part.job.cancel()
