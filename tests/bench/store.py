"""`python -m tests.bench.store`: the store alone.

Opening one of 100,000 blocks, finding a long prompt in it, reading blocks back against a plain sequential read of the
same file, what a block costs on disk.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Event

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.block_tree import BlockTree
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.kv_cache import KVCacheManager
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.tier import BlockRecord, TierCopy
from chatkv.engine.tiers.tier_manager import TierManager
from tests.running_service import ROOT

from .report import Report, median

KEY = b"k" * 32
FINGERPRINT = CacheFingerprint.from_facts({"model": "bench"})
QUOTA_BYTES = 8 << 30
NUM_TINY_BLOCKS = 100_000
TINY_BYTES = 4096
NUM_CHAIN_BLOCKS = 2000
"""32,000 tokens."""
IMAGE_BYTES = 368_640
"""Of a block of the default model in fp16."""
NUM_READ_BLOCKS = 700
"""About 500 MB."""
NUM_REPEATS = 3
NUM_READ_REPEATS = 9
"""Alternating with the plain read: a shared disk has slow moments, which hit either."""


class _NoImages:
    image_bytes = TINY_BYTES

    def read(self, block_id: int) -> memoryview:
        raise AssertionError("nothing is stored here")

    def write(self, block_id: int, image: memoryview) -> None:
        raise AssertionError("nothing is loaded here")


def records(hasher: BlockHasher, num_blocks: int, seed: int) -> list[BlockRecord]:
    random = Random(seed)
    made: list[BlockRecord] = []
    parent_hash = hasher.root_hash
    for position in range(num_blocks):
        ids = tuple(random.randrange(50_000) for _ in range(BLOCK_SIZE))
        block_hash = hasher.block_hash(parent_hash, ids)
        made.append(BlockRecord(block_hash, parent_hash, position, array("I", ids).tobytes(), b""))
        parent_hash = block_hash
    return made


def fill_tiny(directory: Path) -> list[BlockRecord]:
    """100,000 blocks in chains of 2,000; the last chain."""
    hasher = BlockHasher(KEY, FINGERPRINT)
    store = DiskStore.open(directory, KEY, QUOTA_BYTES)
    tier = store.tier_for(FINGERPRINT.digest, TINY_BYTES, "bench", "0" * 64)
    slab = tier._slab
    image = memoryview(bytes(TINY_BYTES))
    chain: list[BlockRecord] = []
    for seed in range(NUM_TINY_BLOCKS // NUM_CHAIN_BLOCKS):
        chain = records(hasher, NUM_CHAIN_BLOCKS, seed)
        rows = [(slab.take_slot(), record, 1.0, time.time()) for record in chain]
        for slot, record, _, _ in rows:
            slab.write(slot, record, image)
        slab.sync()
        slab.commit(rows)
    tier.close()
    store.close()
    return chain


def measure_opening(folder: Path, report: Report) -> None:
    chain = fill_tiny(folder)
    hasher = BlockHasher(KEY, FINGERPRINT)
    prompt = array("I", b"".join(record.packed_ids for record in chain)).tolist()
    opened, matched = [], []
    for _ in range(NUM_REPEATS):
        gc.collect()
        started = time.perf_counter()
        store = DiskStore.open(folder, KEY, QUOTA_BYTES)
        tier = store.tier_for(FINGERPRINT.digest, TINY_BYTES, "bench", "0" * 64)
        tree = BlockTree(hasher.root_hash)
        tiers = TierManager(tree, [tier], _NoImages())
        opened.append(time.perf_counter() - started)
        assert len(tree.nodes()) == NUM_TINY_BLOCKS
        matched += [match_s(hasher, tree, tiers, prompt) for _ in range(NUM_REPEATS)]
        tier.close()
        store.close()
    report.add(f"opening a store of {NUM_TINY_BLOCKS:,} blocks, with its tree", median(opened), "s", limit="<= 1")
    report.add("matching a prompt of 32,000 tokens", 1000 * median(matched), "ms", limit="<= 5")


def match_s(hasher: BlockHasher, tree: BlockTree, tiers: TierManager, token_ids: Sequence[int]) -> float:
    """Hashing and finding every block of the prompt, as the engine does when a request comes."""
    kv = KVCacheManager(1, hasher, tree, tiers)
    started = time.perf_counter()
    found = kv.find_chain(token_ids, b"")
    elapsed_s = time.perf_counter() - started
    assert len(found) == NUM_CHAIN_BLOCKS
    return elapsed_s


def measure_reading(folder: Path, report: Report) -> None:
    hasher = BlockHasher(KEY, FINGERPRINT)
    store = DiskStore.open(folder, KEY, QUOTA_BYTES)
    tier = store.tier_for(FINGERPRINT.digest, IMAGE_BYTES, "bench", "0" * 64)
    random = Random(5)
    image = bytearray(random.randbytes(IMAGE_BYTES))
    copies: list[TierCopy] = []
    started = time.perf_counter()
    for record in records(hasher, NUM_READ_BLOCKS, seed=7):
        image[:8] = random.randbytes(8)
        while (copy := tier.store(record, copies[-1] if copies else None, memoryview(image), list, False)) is None:
            tier.flush(60.0)
        copies.append(copy)
    tier.flush(60.0)
    payload_bytes = NUM_READ_BLOCKS * IMAGE_BYTES
    report.add("storing, with every sync", payload_bytes / (time.perf_counter() - started) / 1e6, "MB/s")
    report.add("bytes on disk per byte of KV", store.status().used_bytes / payload_bytes, "", limit="<= 1.05")
    file = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    plain, restored = [], []
    for _ in range(NUM_READ_REPEATS):
        plain.append(file.stat().st_size / sequential_read_s(file) / 1e6)
        drop_cache(file)
        restored.append(payload_bytes / load_s(tier, copies) / 1e6)
    report.add("plain sequential read of the slab, cold", median(plain), "MB/s")
    report.add("reading back, verified, cold", median(restored), "MB/s", against=median(plain), limit="ratio >= 0.75")
    warm = payload_bytes / load_s(tier, copies) / 1e6
    report.add("reading back, verified, from the page cache", warm, "MB/s")
    tier.close()
    store.close()


def drop_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def sequential_read_s(file: Path) -> float:
    drop_cache(file)
    buffer = bytearray(1 << 20)
    started = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - started


def load_s(tier: DiskTier, copies: Sequence[TierCopy]) -> float:
    """Until the last image was given and copied, as into a pool."""
    has_changed = Event()
    tier.on_change = has_changed.set
    pool = bytearray(IMAGE_BYTES)
    started = time.perf_counter()
    job = tier.start_load(copies, 600.0)
    num_images = 0
    while True:
        has_changed.clear()
        for image in job.take():
            pool[:] = image
            job.release(image)
            num_images += 1
        if job.is_done:
            break
        has_changed.wait(10)
    assert num_images == len(copies)
    return time.perf_counter() - started


def measure(folder: Path, report: Report) -> None:
    """`folder` is emptied before and afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        measure_opening(folder / "tiny", report)
        measure_reading(folder / "blocks", report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench-store", help="on the disk to measure")
    report = Report()
    measure(parser.parse_args().folder.absolute(), report)
    report.print_table()
