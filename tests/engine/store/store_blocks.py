"""Blocks for the store, and slabs and stores to put them in. The store does not look into names: any bytes will do."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from chatkv.engine.store.cipher import Cipher
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.store.files import Files, OsFiles
from chatkv.engine.store.index import BlockRow, StoreIndex
from chatkv.engine.store.slab import Slab
from chatkv.engine.store.slab_header import SlabHeader, write_slab_header
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.tier import BlockRecord, TierCopy

PAYLOAD_BYTES = 8192
SLOT_BYTES = 4096 + PAYLOAD_BYTES
FINGERPRINT = bytes(range(32))
OTHER_FINGERPRINT = bytes(range(32, 64))
KEY = b"k" * 32
MASTER_KEY = b"m" * 32
QUOTA_BYTES = 64 << 20
MARK = b"MARK"


@dataclass(frozen=True, slots=True)
class Block:
    record: BlockRecord
    image: bytes

    @property
    def name(self) -> bytes:
        return self.record.block_hash


def chain(length: int, seed: int = 1, parent: Block | None = None, extra: bytes = b"") -> list[Block]:
    random = Random(seed)
    blocks: list[Block] = []
    for _ in range(length):
        above = blocks[-1] if blocks else parent
        record = BlockRecord(
            block_hash=random.randbytes(16),
            parent_hash=above.name if above else bytes(16),
            position=above.record.position + 1 if above else 0,
            packed_ids=random.randbytes(64),
            extra=extra,
        )
        blocks.append(Block(record, random.randbytes(PAYLOAD_BYTES)))
    return blocks


class SlabBench:
    """One slab with its index, without the store around them."""

    def __init__(self, folder: Path, cipher: Cipher | None = None, files: Files | None = None) -> None:
        self.path = folder / "one.slab"
        self.cipher = cipher
        self._files = files or OsFiles()
        is_new = not self.path.exists()
        self.index = StoreIndex.open(folder / "index.db", self._files, "key", time.time)
        row = self.index.add_slab(FINGERPRINT, PAYLOAD_BYTES, "m", "sha") if is_new else self.index.slabs()[0]
        header = SlabHeader(bytes(16), FINGERPRINT, PAYLOAD_BYTES, cipher is not None, "m", "sha", row.counter)
        file = self._files.open(self.path)
        if is_new:
            write_slab_header(file, header)
        self.slab = Slab(file, row, header, self.index, cipher)
        self.copies = {copy.record.block_hash: copy for copy in self.slab.stored()}

    def save(self, blocks: Sequence[Block]) -> list[int]:
        return save(self.slab, blocks)

    def close(self) -> None:
        self.slab.close()
        self.index.close()


def reopened(bench: SlabBench) -> SlabBench:
    bench.close()
    return SlabBench(bench.path.parent, bench.cipher)


def save(slab: Slab, blocks: Sequence[Block], hit_at_s: float = 100.0) -> list[int]:
    """As one group; the slots."""
    slots = []
    for block in blocks:
        slots.append(slab.take_slot())
        slab.write(slots[-1], block.record, memoryview(block.image))
    slab.sync()
    slab.commit([(slot, block.record, 1.0, hit_at_s) for slot, block in zip(slots, blocks, strict=True)])
    return slots


def read(slab: Slab, slot: int, expected: BlockRecord | None = None) -> Block:
    memory = memoryview(bytearray(PAYLOAD_BYTES))
    record = slab.read(slot, memory, expected)
    return Block(record, bytes(memory))


def churn(index: StoreIndex, slab_id: int) -> tuple[set[bytes], set[bytes]]:
    """Rows of mixed lengths come and go, so that SQLite rebalances pages; marked pieces of those that are there, and
    of those that were."""
    random = Random(5)
    held: dict[int, list[bytes]] = {}
    gone: set[bytes] = set()
    for _ in range(250):
        rows = []
        for slot in random.sample(range(20_000), 30):
            if slot not in held:
                name, head, tail = (MARK + random.randbytes(12) for _ in range(3))
                ids = head + random.randbytes(32) + tail
                extra = random.randbytes(random.choice([0, 0, 0, 30, 900, 3000]))
                rows.append(BlockRow(slot, name, bytes(16), 0, ids, extra, 1.0, 1.0, None))
                held[slot] = [name, head, tail]
        index.add_rows(slab_id, rows, 0, 0)
        slots = random.sample(sorted(held), random.randrange(1, 30))
        gone |= {piece for slot in slots for piece in held.pop(slot)}
        index.remove_rows(slab_id, slots, is_durable=False)
    return {piece for pieces in held.values() for piece in pieces}, gone


def marked_pieces(directory: Path) -> set[bytes]:
    left = all_bytes(directory)
    return {left[found.start() : found.start() + 16] for found in re.finditer(MARK, left)}


def open_store(directory: Path, **options: Any) -> DiskStore:
    arguments = {"key": KEY, "quota_bytes": QUOTA_BYTES} | options
    return DiskStore.open(directory, **arguments)


def fill(
    store: DiskStore,
    blocks: Sequence[Block],
    fingerprint: bytes = FINGERPRINT,
    *,
    owner: str = "chat",
    sha256: str = "sha",
) -> None:
    """Store chains through a tier, and close it."""
    tier = store.tier_for(fingerprint, PAYLOAD_BYTES, "model", sha256)
    copies = {copy.record.block_hash: copy for copy in tier.copies()}
    for block in blocks:
        copy = tier.store(
            block.record, copies.get(block.record.parent_hash), memoryview(block.image), lambda: [owner], False
        )
        assert copy is not None
        copies[block.name] = copy
    assert tier.flush(30)
    tier.close()


def with_blocks(directory: Path) -> None:
    """A closed store with one chain of three."""
    store = open_store(directory)
    fill(store, chain(3))
    store.close()


def fill_open(tier: DiskTier, blocks: Sequence[Block]) -> None:
    """Store one chain through an open tier."""
    copies: dict[bytes, TierCopy | None] = {}
    for block in blocks:
        copies[block.name] = tier.store(
            block.record, copies.get(block.record.parent_hash), memoryview(block.image), list, False
        )
    assert tier.flush(30)


def stored_names(store: DiskStore, fingerprint: bytes = FINGERPRINT) -> set[bytes]:
    tier = store.tier_for(fingerprint, PAYLOAD_BYTES, "model", "sha")
    names = {copy.record.block_hash for copy in tier.copies()}
    tier.close()
    return names


def names(blocks: Sequence[Block]) -> set[bytes]:
    return {block.name for block in blocks}


def all_bytes(directory: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file())


def allocated(directory: Path) -> int:
    """As `du` counts."""
    return sum(path.lstat().st_blocks * 512 for path in [directory, *directory.rglob("*")])
