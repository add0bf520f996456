"""Drives a disk tier as the engine would, with blocks whose images are known, and compares what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.store.files import Files, OsFiles
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.tier import BlockRecord, CopyState, TierCopy

KEY = b"k" * 32
MASTER_KEY = b"m" * 32
IMAGE_BYTES = 4096
QUOTA_BYTES = 64 << 20
FLUSH_S = 30.0
FINGERPRINT = CacheFingerprint.from_facts({"model": "faults"})


@dataclass(frozen=True, slots=True)
class Block:
    record: BlockRecord
    image: bytes

    @property
    def name(self) -> bytes:
        return self.record.block_hash


def chain(num_blocks: int, seed: int, parent: Block | None = None, image_bytes: int = IMAGE_BYTES) -> list[Block]:
    """Blocks one under the other, with ids and images drawn by lot; no two seeds share a block."""
    random = Random(seed)
    hasher = BlockHasher(KEY, FINGERPRINT)
    blocks: list[Block] = []
    parent_hash = parent.name if parent else hasher.root_hash
    first = parent.record.position + 1 if parent else 0
    for position in range(first, first + num_blocks):
        ids = tuple(random.randrange(2**32) for _ in range(BLOCK_SIZE))
        extra = random.randbytes(24) if position == 0 else b""
        block_hash = hasher.block_hash(parent_hash, ids, extra)
        packed = b"".join(token_id.to_bytes(4, "little") for token_id in ids)
        blocks.append(
            Block(BlockRecord(block_hash, parent_hash, position, packed, extra), random.randbytes(image_bytes))
        )
        parent_hash = block_hash
    return blocks


class DiskDriver:
    """One open store with one tier. `close` it."""

    def __init__(
        self,
        directory: Path,
        files: Files | None = None,
        *,
        quota_bytes: int = QUOTA_BYTES,
        image_bytes: int = IMAGE_BYTES,
        is_encrypted: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = DiskStore.open(
            directory,
            KEY,
            quota_bytes,
            master_key=MASTER_KEY if is_encrypted else None,
            files=files or OsFiles(),
            clock=clock,
        )
        self.tier: DiskTier = self.store.tier_for(FINGERPRINT.digest, image_bytes, "faults", "0" * 64)
        self._has_changed = Event()
        self.tier.on_change = self._has_changed.set
        self.copies = {copy.record.block_hash: copy for copy in self.tier.copies()}

    def put(self, blocks: Sequence[Block], owner: str = "chat") -> list[TierCopy]:
        """Offers a chain, first to last; ends at the first that is refused."""
        accepted = []
        for block in blocks:
            parent = self.copies.get(block.record.parent_hash)
            if block.record.position and parent is None:
                break
            copy = self.tier.store(
                block.record, parent, memoryview(block.image), lambda: [owner] if owner else [], False
            )
            if copy is None:
                break
            self.copies[block.name] = copy
            accepted.append(copy)
        return accepted

    def save(self, blocks: Sequence[Block], owner: str = "chat") -> None:
        """As `put`, and waits until all is on disk."""
        assert len(self.put(blocks, owner)) == len(blocks), self.tier.stats()
        self.settle()

    def settle(self) -> None:
        assert self.tier.flush(FLUSH_S)
        self.poll()

    def poll(self) -> None:
        for copy in self.tier.poll():
            if copy.state is CopyState.GONE and self.copies.get(copy.record.block_hash) is copy:
                del self.copies[copy.record.block_hash]

    def remove(self, names: Collection[bytes], *, is_forgotten: bool) -> None:
        """And waits until it is done."""
        copies = [self.copies.pop(name) for name in names if name in self.copies]
        self.tier.remove(copies, is_forgotten=is_forgotten)
        for name in [name for name, copy in self.copies.items() if copy.state is CopyState.GONE]:
            del self.copies[name]
        self.settle()

    @property
    def alive(self) -> frozenset[bytes]:
        return frozenset(name for name, copy in self.copies.items() if copy.state is CopyState.STORED)

    def path_to(self, copy: TierCopy) -> list[TierCopy]:
        path = [copy]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def load(self, copies: Sequence[TierCopy], deadline_s: float = FLUSH_S) -> list[bytes]:
        """The images that came, first to last."""
        job = self.tier.start_load(copies, deadline_s)
        images: list[bytes] = []
        while True:
            self._has_changed.clear()
            for image in job.take():
                images.append(bytes(image))
                job.release(image)
            if job.is_done:
                return images
            assert self._has_changed.wait(FLUSH_S), "a load neither ends nor says anything"

    def load_all(self) -> dict[bytes, bytes]:
        """Everything that can be read, by name."""
        found: dict[bytes, bytes] = {}
        parents = {copy.parent for copy in self.copies.values()}
        for leaf in [copy for copy in self.copies.values() if copy not in parents]:
            path = self.path_to(leaf)
            found |= {copy.record.block_hash: image for copy, image in zip(path, self.load(path), strict=False)}
        return found

    def close(self) -> None:
        self.tier.close()
        self.store.close()


def check_contents(driver: DiskDriver, known: Sequence[Block], where: str = "") -> dict[bytes, bytes]:
    """All that the store gives is what was given to it, under the same name; the images found."""
    by_name = {block.name: block for block in known}
    for name, copy in driver.copies.items():
        assert name in by_name, f"a block that was never stored: {where}"
        assert copy.record == by_name[name].record, f"a record differs: {where}"
        assert (copy.parent is None) == (copy.record.position == 0), f"a record without its parent: {where}"
    found = driver.load_all()
    for name, image in found.items():
        assert image == by_name[name].image, f"WRONG BYTES: {where}"
    return found
