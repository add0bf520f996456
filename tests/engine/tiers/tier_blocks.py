"""Blocks with images that name them, for tests of tiers."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import monotonic

from chatkv.engine.tiers.tier import BlockRecord, LoadJob, LowerTier, TierCopy

IMAGE_BYTES = 4096
ROOT = b"r" * 16
WAIT_S = 20.0


def record(position: int, chain: int = 0, parent: BlockRecord | None = None) -> BlockRecord:
    """Block `position` of chain number `chain`; chains that share a parent branch off there."""
    parent_hash = parent.block_hash if parent else ROOT
    ids = struct.pack("<16I", *(1000 * chain + 16 * position + i for i in range(16)))
    block_hash = blake2b(parent_hash + ids, digest_size=16).digest()
    return BlockRecord(block_hash, parent_hash, position, ids, b"")


def chain(num_blocks: int, number: int = 0) -> list[BlockRecord]:
    records: list[BlockRecord] = []
    for position in range(num_blocks):
        records.append(record(position, number, records[-1] if records else None))
    return records


def image(of: BlockRecord, num_bytes: int = IMAGE_BYTES) -> memoryview:
    """Nothing else looks like it."""
    return memoryview(blake2b(of.block_hash, digest_size=64).digest() * (num_bytes // 64))


def store_chain(
    tier: LowerTier, records: Sequence[BlockRecord], owner: str = "", is_pinned: bool = False
) -> list[TierCopy]:
    """What was accepted of it, first to last."""
    copies: list[TierCopy] = []
    for one in records:
        parent = copies[-1] if copies else None
        copy = tier.store(one, parent, image(one, tier.image_bytes), lambda: [owner] if owner else [], is_pinned)
        if copy is None:
            break
        copies.append(copy)
    return copies


class Changes:
    """An `on_change` that a test can wait on."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __call__(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """The state asked about may change without a call, so it is looked at again and again."""
        until = monotonic() + WAIT_S
        with self._condition:
            while not predicate():
                assert monotonic() < until, "what was waited for did not happen"
                self._condition.wait(0.01)


def load_all(job: LoadJob, changes: Changes) -> list[bytes]:
    """Everything that comes of a load, in order."""
    images: list[bytes] = []

    def is_over() -> bool:
        for view in job.take():
            images.append(bytes(view))
            job.release(view)
        return job.is_done

    changes.wait_for(is_over)
    return images
