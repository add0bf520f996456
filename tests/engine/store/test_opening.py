"""How long a large store takes to open."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
from store_blocks import FINGERPRINT, PAYLOAD_BYTES, SLOT_BYTES, open_store

from chatkv.engine.store.index import BlockRow
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES

NUM_BLOCKS = 100_000
CHAIN_BLOCKS = 500


def rows(random: Random) -> list[BlockRow]:
    made = []
    parent = bytes(16)
    for slot in range(NUM_BLOCKS):
        position = slot % CHAIN_BLOCKS
        name = random.randbytes(16)
        made.append(
            BlockRow(slot, name, parent if position else bytes(16), position, random.randbytes(64), b"", 1.0, 1.0, None)
        )
        parent = name
    return made


@pytest.mark.slow
def test_a_hundred_thousand_blocks_are_opened_in_half_a_second_of_work(folder: Path) -> None:
    """Half of what it may take: the tree needs the rest. Opening reads no record, so there are none here."""
    store = open_store(folder / "kv", quota_bytes=8 << 30)
    store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha").close()
    [slab] = store.index.slabs()
    store.index.add_rows(slab.id, rows(Random(1)), slab.counter, 0)
    with (folder / "kv" / f"{FINGERPRINT.hex()}.slab").open("r+b") as file:
        file.truncate(SLAB_HEADER_BYTES + NUM_BLOCKS * SLOT_BYTES)
    store.close()
    since = time.process_time()
    store = open_store(folder / "kv", quota_bytes=8 << 30)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    assert len(tier.copies()) == NUM_BLOCKS
    assert time.process_time() - since < 0.5
    store.close()
