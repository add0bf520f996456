"""Numbers that the store keeps, and the ids of answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_blocks import (
    FINGERPRINT,
    MASTER_KEY,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    all_bytes,
    allocated,
    chain,
    fill,
    fill_open,
    open_store,
)


def test_numbers_are_kept(home: Path) -> None:
    store = open_store(home)
    store.set_constant("rate", {"a": 1.5})
    store.count_hits("disk", 32)
    store.count_computed(16)
    fill(store, chain(2))
    store.close()
    store = open_store(home)
    assert store.constant("rate") == {"a": 1.5}
    assert store.constant("nothing", 7) == 7
    assert store.tokens_24h() == {"disk": 32, "computed": 16}
    status = store.status()
    assert status.written_today_bytes == 2 * SLOT_BYTES
    assert status.used_bytes == allocated(home)
    [slab] = status.slabs
    assert (slab.model, slab.num_blocks, slab.is_open) == ("model", 2, False)
    store.close()


@pytest.mark.parametrize("master_key", [None, MASTER_KEY], ids=["plain", "encrypted"])
def test_a_run_is_written_with_its_block_and_dies_with_it(home: Path, master_key: bytes | None) -> None:
    blocks = chain(3)
    ids = [987654321, 123456789, 55555]
    store = open_store(home, master_key=master_key)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, blocks[:2])
    store.put_run(FINGERPRINT, b"r" * 16, blocks[2].name, ids)
    assert store.find_run(b"r" * 16) is None, "nothing of an answer is written before its last block"
    above = tier.copies()[1]
    assert tier.store(blocks[2].record, above, memoryview(blocks[2].image), list, False)
    assert tier.flush(30)
    assert store.find_run(b"r" * 16) == tuple(ids)
    store.close()
    store = open_store(home, master_key=master_key)
    assert store.runs() == [(b"r" * 16, tuple(ids))]
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert (packed in all_bytes(home)) == (master_key is None)
    store.forget_elsewhere(FINGERPRINT, {blocks[2].name}, set())
    assert store.find_run(b"r" * 16) is None
    assert packed not in all_bytes(home)
    store.close()
