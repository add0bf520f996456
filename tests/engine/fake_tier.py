"""A lower tier in memory that does what a test tells it: refuse, wait, fail, damage, evict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from chatkv.engine.tiers.tier import BlockRecord, CopyState, Owners, TierCopy, TierStats

GARBAGE = 0xEE


class FakeJob:
    """Gives an image for each `deliver`, or all at once when the tier is prompt."""

    def __init__(self, tier: FakeTier, copies: Sequence[TierCopy]) -> None:
        self.tier = tier
        self.copies = list(copies)
        self.num_delivered = 0
        self.num_taken = 0
        self.delivered: list[bytearray] = []
        self.is_cancelled = False
        self.is_failed = False
        self.buffers: list[bytearray] = []
        for copy in self.copies:
            copy.num_readers += 1

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.is_failed or self.num_delivered == len(self.copies)

    def deliver(self, num_images: int = 1) -> None:
        for _ in range(num_images):
            if self.is_over:
                return
            if self.copies[self.num_delivered].state is not CopyState.STORED:
                self.fail()
                return
            self.delivered.append(bytearray(self.tier.image_of(self.copies[self.num_delivered])))
            self.num_delivered += 1
            if self.is_over:
                self._let_go()
        self.tier.on_change()

    def fail(self) -> None:
        """The next copy cannot be read, or not be believed."""
        if not self.is_over:
            self.is_failed = True
            self._let_go()
            self.tier.on_change()

    def take(self) -> list[memoryview]:
        if self.is_cancelled:
            return []
        taken, self.delivered = self.delivered, []
        self.buffers += taken
        self.num_taken += len(taken)
        self.tier.num_loaded += len(taken)
        return [memoryview(image) for image in taken]

    def release(self, image: memoryview) -> None:
        buffer = image.obj
        assert any(buffer is own for own in self.buffers), "released twice, or to another job"
        self.buffers = [own for own in self.buffers if own is not buffer]
        assert isinstance(buffer, bytearray)
        buffer[:] = bytes([GARBAGE]) * len(buffer)

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or (self.is_over and self.num_taken == self.num_delivered)

    def cancel(self) -> None:
        assert not self.buffers, "an image was kept"
        if not self.is_over:
            self._let_go()
        self.is_cancelled = True

    def _let_go(self) -> None:
        for copy in self.copies:
            copy.num_readers -= 1
        self.tier.jobs.remove(self)


class FakeTier:
    """`is_prompt`: what is accepted is safe, and what is asked for is read, at once."""

    def __init__(
        self,
        name: str = "disk",
        image_bytes: int = 256,
        *,
        capacity: int = 1000,
        queue_limit: int = 1000,
        is_prompt: bool = True,
        read_bytes_per_s: float = 0.0,
    ) -> None:
        self.name = name
        self.image_bytes = image_bytes
        self.on_change: Callable[[], None] = lambda: None
        self.capacity = capacity
        self.queue_limit = queue_limit
        self.is_prompt = is_prompt
        self.is_refusing = False
        self.read_bytes_per_s = read_bytes_per_s
        self.shift = 0
        """A wrong tier: gives the image of the copy so many places further on."""
        self.images: dict[TierCopy, bytes] = {}
        self.jobs: list[FakeJob] = []
        self.touched: Counter[bytes] = Counter()
        self.num_written: Counter[bytes] = Counter()
        self.owners: dict[bytes, set[str]] = {}
        self.num_loaded = 0
        self.num_skipped = 0
        self.num_hurried = 0
        self.is_closed = False
        self._events: list[TierCopy] = []

    # --- what the engine asks ---

    def copies(self) -> list[TierCopy]:
        stored = [copy for copy in self.images if copy.state is CopyState.STORED]
        return sorted(stored, key=lambda copy: copy.record.position)

    def store(
        self, record: BlockRecord, parent: TierCopy | None, image: memoryview, owners: Owners, is_pinned: bool
    ) -> TierCopy | None:
        assert len(image) == self.image_bytes
        assert (parent is None) == (record.position == 0)
        assert parent is None or parent.record.block_hash == record.parent_hash
        is_parent_gone = parent is not None and parent.state is CopyState.GONE
        if self.is_refusing or is_parent_gone or len(self.queued) >= self.queue_limit or not self._has_room(parent):
            self.num_skipped += 1
            return None
        for other in self.images:
            is_same = other.parent is parent and other.record == record
            assert not is_same, "a block is stored twice"
        copy = TierCopy(record, parent, len(self.images), CopyState.QUEUED, num_pins=int(is_pinned))
        if parent is not None:
            parent.num_children += 1
        self.images[copy] = bytes(image)
        self.num_written[record.block_hash] += 1
        self.owners[record.block_hash] = set(owners())
        if self.is_prompt:
            self.write(copy)
        return copy

    def start_load(self, copies: Sequence[TierCopy], deadline_s: float) -> FakeJob:
        for parent, child in pairwise(copies):
            assert child.parent is parent, "not a chain"
        job = FakeJob(self, copies)
        self.jobs.append(job)
        if self.is_prompt:
            job.deliver(len(job.copies))
        return job

    def touch(self, copies: Sequence[TierCopy]) -> None:
        self.touched.update(copy.record.block_hash for copy in copies)

    def pin(self, copies: Sequence[TierCopy], is_pinned: bool) -> None:
        for copy in copies:
            copy.num_pins += 1 if is_pinned else -1
            assert copy.num_pins >= 0

    def remove(self, copies: Sequence[TierCopy], *, is_forgotten: bool) -> None:
        for copy in copies:
            self._lose(copy, is_reported=False)

    def poll(self) -> list[TierCopy]:
        events, self._events = self._events, []
        return events

    def flush(self, timeout_s: float) -> bool:
        if timeout_s <= 0:
            self.num_hurried += 1
            return not self.queued
        for copy in self.queued:
            self.write(copy)
        return True

    def stats(self) -> TierStats:
        return TierStats(
            num_blocks=len(self.images) - len(self.queued),
            num_queued=len(self.queued),
            used_bytes=len(self.images) * self.image_bytes,
            limit_bytes=self.capacity * self.image_bytes,
            read_bytes_per_s=self.read_bytes_per_s,
            num_loaded=self.num_loaded,
            num_stored=self.num_written.total(),
            num_skipped=self.num_skipped,
        )

    def close(self) -> None:
        self.flush(1)
        self.is_closed = True

    # --- what the test does ---

    @property
    def queued(self) -> list[TierCopy]:
        return [copy for copy in self.images if copy.state is CopyState.QUEUED]

    @property
    def evictable(self) -> list[TierCopy]:
        """Safe leaves that nobody reads and nobody pins."""
        return [
            copy
            for copy in self.images
            if copy.state is CopyState.STORED and not (copy.num_children or copy.num_readers or copy.num_pins)
        ]

    def write(self, copy: TierCopy) -> None:
        """It is safe from now on."""
        if copy.state is CopyState.QUEUED:
            copy.state = CopyState.STORED
            self._events.append(copy)
            self.on_change()

    def lose(self, copy: TierCopy) -> None:
        """Damaged or never written: gone, with all below it."""
        self._lose(copy, is_reported=True)
        self.on_change()

    def evict(self, copy: TierCopy) -> None:
        copy.is_evicted = True
        self.lose(copy)

    def image_of(self, copy: TierCopy) -> bytes:
        chain = list(self.images)
        return self.images[chain[(chain.index(copy) + self.shift) % len(chain)]] if self.shift else self.images[copy]

    def tick(self, random: Random) -> None:
        """Something happens."""
        for copy in self.queued:
            chance = random.random()
            if chance < 0.3 and (copy.parent is None or copy.parent.state is CopyState.STORED):
                self.write(copy)
            elif chance < 0.32:
                self.lose(copy)
        for job in list(self.jobs):
            chance = random.random()
            if chance < 0.05:
                job.fail()
            elif chance < 0.5:
                job.deliver(random.randrange(1, 4))
        if random.random() < 0.05 and self.evictable:
            self.evict(random.choice(self.evictable))
        if random.random() < 0.01 and self.images:
            self.lose(random.choice(list(self.images)))
        self.is_refusing = random.random() < 0.1

    def _has_room(self, parent: TierCopy | None) -> bool:
        while len(self.images) >= self.capacity:
            victims = [copy for copy in self.evictable if copy is not parent]
            if not victims:
                return False
            self.evict(min(victims, key=lambda copy: self.touched[copy.record.block_hash]))
        return True

    def _lose(self, copy: TierCopy, is_reported: bool) -> None:
        if copy.state is CopyState.GONE:
            return
        copy.state = CopyState.GONE
        if copy.parent is not None:
            copy.parent.num_children -= 1
        del self.images[copy]
        if is_reported:
            self._events.append(copy)
        for child in [other for other in self.images if other.parent is copy]:
            self._lose(child, is_reported)

    @property
    def unreported(self) -> list[TierCopy]:
        """What the next `poll` will give."""
        return list(self._events)
