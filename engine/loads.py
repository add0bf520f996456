"""Blocks on their way from a lower tier to the device. The sequence that asked for them waits, the batch goes on.

Device blocks are reserved at the start. Images are copied into them here alone, for a load that lives: on the engine's
thread between steps, or by the device itself, and then who gives up the load waits for what is being copied. So nothing
can be written into the pool after a cancel or a deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .block_tree import BlockNode
from .config import BLOCK_SIZE
from .kv_cache import KVCacheManager
from .metrics import EngineCounters
from .request import LoadDecision
from .sequence import SequenceState
from .tiers.tier import BlockImages, CopyingImages, ImageCopy
from .tiers.tier_manager import LoadPart, TierManager

STALL_S = 2.0
"""When nothing has come for so long, neither for a load nor for another one that may have the tier's buffers, the load
is given up, and the rest is computed."""
DEADLINE_S = 60.0
"""Of a whole load. One that stalls ends long before."""


@dataclass(frozen=True, slots=True)
class BlockWrites:
    """Images that the device copies into blocks."""

    copy: ImageCopy
    part: LoadPart
    images: Sequence[memoryview]
    block_ids: Sequence[int]


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
    writes: deque[BlockWrites] = field(default_factory=deque)
    """What is being copied, in order."""
    num_left_in_part: int = 0

    @property
    def reserved(self) -> list[int]:
        """Blocks that the sequence does not hold yet."""
        return [*(block_id for writes in self.writes for block_id in writes.block_ids), *self.block_ids]

    @property
    def num_placed(self) -> int:
        return len(self.nodes) - len(self.reserved)


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
        self._copying = images if isinstance(images, CopyingImages) else None
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
            num_before = len(load.block_ids)
            self._finish_writes(load)
            is_ended = self._copy_ready(load, budget_bytes) and not load.writes
            if num_copied := num_before - len(load.block_ids):
                budget_bytes -= num_copied * self._image_bytes
                self._progress_s = self._clock()
            if is_ended or (not self.has_ready and self._clock() > self._stalls_at_s(load)):
                self.cancel(sequence)
                ended.append(sequence)
        return ended

    def cancel(self, sequence: SequenceState) -> None:
        """What was placed stays with the sequence, the other reserved blocks are free. Nothing more is written."""
        load = self._loads.pop(sequence)
        _wait(load)
        self._finish_writes(load)
        _stop(load)
        self._kv.pool.free(list(load.block_ids), is_used=False)
        active = sequence.active
        if active.load is load.decision:
            active.load = replace(load.decision, num_loaded_tokens=load.num_placed * BLOCK_SIZE)

    def abandon(self) -> None:
        """The engine starts anew: pool and sequences are gone."""
        for load in self._loads.values():
            for writes in load.writes:
                with suppress(Exception):
                    writes.copy.wait()
                _release(writes)
            _stop(load)
        self._loads.clear()

    def wait(self) -> None:
        """For what is being copied; it is yet to be placed."""
        for load in self._loads.values():
            _wait(load)

    @property
    def has_ready(self) -> bool:
        """Images that have come wait to be copied, or are being copied."""
        return any(load.ready or load.writes for load in self._loads.values())

    @property
    def stalls_at_s(self) -> float | None:
        """By the clock: when the first load is given up unless something comes."""
        return min((self._stalls_at_s(load) for load in self._loads.values()), default=None)

    def num_reserved(self, sequence: SequenceState) -> int:
        """Blocks that its load holds beside the sequence's own."""
        return len(self._loads[sequence].reserved) if sequence in self._loads else 0

    def brings(self, sequence: SequenceState, index: int) -> bool:
        """Block `index` of the sequence is on its way."""
        load = self._loads.get(sequence)
        return load is not None and 0 <= index - len(sequence.nodes) < len(load.reserved)

    def nodes(self) -> Iterator[BlockNode]:
        for load in self._loads.values():
            yield from load.nodes

    def reserved_block_ids(self) -> Iterator[int]:
        for load in self._loads.values():
            yield from load.reserved

    @property
    def _image_bytes(self) -> int:
        assert self._images is not None
        return self._images.image_bytes

    def _stalls_at_s(self, load: Load) -> float:
        return max(load.start_s, self._progress_s) + STALL_S

    def _copy_ready(self, load: Load, budget_bytes: int) -> bool:
        """True when nothing more will come that is not being copied."""
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
                num_blocks = min(len(load.ready), -(-budget_bytes // self._image_bytes))
                num_blocks = min(num_blocks, 1 if self._copying is None else self._copying.num_free_writes)
                if num_blocks <= 0:
                    return False
                if self._copying is None:
                    self._place(load)
                else:
                    self._start_writes(load, self._copying, num_blocks)
                budget_bytes -= num_blocks * self._image_bytes
        return True

    def _start_writes(self, load: Load, images: CopyingImages, num_blocks: int) -> None:
        assert load.num_left_in_part >= num_blocks, "a tier gave more than it was asked for"
        ready = [load.ready.popleft() for _ in range(num_blocks)]
        block_ids = [load.block_ids.popleft() for _ in range(num_blocks)]
        load.num_left_in_part -= num_blocks
        load.writes.append(BlockWrites(images.start_write(block_ids, ready), load.parts[0], ready, block_ids))

    def _finish_writes(self, load: Load) -> None:
        """What the device has copied is the sequence's."""
        while load.writes and load.writes[0].copy.is_done:
            writes = load.writes.popleft()
            _release(writes)
            for block_id in writes.block_ids:
                self._kv.place_loaded(load.sequence, block_id)
                self._counters.count_hit(load.sequence, writes.part.tier_name)

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


def _wait(load: Load) -> None:
    for writes in load.writes:
        writes.copy.wait()


def _release(writes: BlockWrites) -> None:
    writes.copy.release()
    for image in writes.images:
        writes.part.job.release(image)


def _stop(load: Load) -> None:
    for image in load.ready:
        load.parts[0].job.release(image)
    load.ready.clear()
    for part in load.parts:
        part.job.cancel()
