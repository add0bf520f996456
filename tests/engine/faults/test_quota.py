"""D1: not one byte more than the quota, at any moment that another process can see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from disk_driver import KEY, DiskDriver, chain, check_contents

from chatkv.engine.block_hash import CacheFingerprint
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers.tier import TierCopy

IMAGE_BYTES = 65_536
MIB = 1 << 20

OBSERVER = """
import os, select, sys

def used(folder):
    total = os.lstat(folder).st_blocks * 512
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                total += used(entry.path)
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            pass
    return total

most = count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    most, count = max(most, used(sys.argv[1])), count + 1
    if count == 1:
        print("watching", flush=True)
print(most, count, flush=True)
"""


class Observed:
    most_bytes = 0
    num_looks = 0


@contextmanager
def observer(directory: Path) -> Iterator[Observed]:
    """A process that looks at the directory all the time, on a core of its own."""
    observed = Observed()
    command = [sys.executable, "-c", OBSERVER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        try:
            yield observed
        finally:
            output, _ = process.communicate("stop\n", timeout=60)
        observed.most_bytes, observed.num_looks = map(int, output.split())


def traffic(store: DiskStore, number: int, num_chats: int) -> None:
    """Chats that come, grow, are hit again and are deleted, on one model of the store."""
    random = Random(number)
    fingerprint = CacheFingerprint.from_facts({"model": f"traffic {number}"}).digest
    tier = store.tier_for(fingerprint, IMAGE_BYTES, f"model {number}", f"{number:064x}")
    chains: list[list[TierCopy]] = []
    for chat in range(num_chats):
        parent: TierCopy | None = None
        if chains and random.random() < 0.4:
            chosen = random.choice(chains)
            parent = random.choice(chosen) if chosen else None
        copies: list[TierCopy] = []
        first = parent.record.position + 1 if parent else 0
        for offset, block in enumerate(chain(random.randint(1, 6), seed=1000 * number + chat, image_bytes=IMAGE_BYTES)):
            parent_hash = parent.record.block_hash if parent else block.record.parent_hash
            record = block.record._replace(position=first + offset, parent_hash=parent_hash)
            copy = tier.store(record, parent, memoryview(block.image), lambda chat=chat: [f"chat {chat}"], False)
            if copy is None:
                tier.flush(30.0)
                break
            copies.append(copy)
            parent = copy
        chains.append(copies)
        if random.random() < 0.15:
            tier.remove(random.choice(chains), is_forgotten=random.random() < 0.5)
        if random.random() < 0.3:
            tier.touch(random.choice(chains))
        tier.poll()
    tier.flush(60.0)
    tier.close()


@pytest.mark.parametrize("num_chats", [60, pytest.param(1500, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_d1_concurrent_stores_never_exceed_the_quota(tmp_path: Path, num_chats: int) -> None:
    quota_bytes = 12 * MIB
    store = DiskStore.open(tmp_path / "store", KEY, quota_bytes)
    with observer(tmp_path / "store") as observed:
        threads = [Thread(target=traffic, args=(store, number, num_chats)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used_bytes = store.status().used_bytes
        store.close()
    assert observed.num_looks > 100
    assert observed.most_bytes <= quota_bytes
    assert used_bytes > quota_bytes // 2, "the traffic never came near the quota: nothing was proven"


def test_d1_lowering_the_quota_shrinks_the_directory_at_once_and_keeps_what_fits(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    driver = DiskDriver(directory, image_bytes=IMAGE_BYTES, quota_bytes=64 * MIB)
    chains = [chain(8, seed=seed, image_bytes=IMAGE_BYTES) for seed in range(24)]
    for blocks in chains:
        driver.save(blocks)
    assert driver.store.status().used_bytes > 8 * MIB
    driver.store.set_quota(4 * MIB)
    with observer(directory) as observed:
        for seed in range(100, 110):
            driver.put(chain(8, seed=seed, image_bytes=IMAGE_BYTES))
            driver.tier.flush(30.0)
        driver.poll()
    assert observed.most_bytes <= 4 * MIB
    known = [
        block
        for blocks in [*chains, *(chain(8, seed=s, image_bytes=IMAGE_BYTES) for s in range(100, 110))]
        for block in blocks
    ]
    assert check_contents(driver, known), "nothing was kept"
    driver.close()


def test_d1_a_smaller_quota_at_the_next_start_holds_before_anything_is_written(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    driver = DiskDriver(directory, image_bytes=IMAGE_BYTES, quota_bytes=64 * MIB)
    for seed in range(12):
        driver.save(chain(8, seed=seed, image_bytes=IMAGE_BYTES))
    driver.close()
    driver = DiskDriver(directory, image_bytes=IMAGE_BYTES, quota_bytes=4 * MIB)
    with observer(directory) as observed:
        driver.put(chain(4, seed=50, image_bytes=IMAGE_BYTES))
        driver.tier.flush(30.0)
    driver.close()
    assert observed.most_bytes <= 4 * MIB
