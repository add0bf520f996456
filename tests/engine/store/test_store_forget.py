"""Forget, scrub, prune, clear, verify."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from store_blocks import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    all_bytes,
    chain,
    fill,
    fill_open,
    names,
    open_store,
    stored_names,
)

from chatkv.engine.errors import EngineError


def test_forgetting_elsewhere_leaves_what_others_own_and_nothing_else(home: Path) -> None:
    stem = chain(4, seed=1)
    mine, theirs = chain(3, seed=2, parent=stem[3]), chain(3, seed=3, parent=stem[1])
    store = open_store(home)
    fill(store, [*stem, *mine, *theirs])
    owned = names([*stem, mine[0]])
    assert store.forget_elsewhere(FINGERPRINT, owned, names(theirs)) == (5, 2)
    assert stored_names(store) == names([*stem[:2], *theirs])
    left = all_bytes(home)
    for block in [*stem[2:], *mine]:
        assert block.record.packed_ids not in left
        assert block.image[:64] not in left
    assert store.forget_elsewhere(b"?" * 32, owned, set()) == (0, 0)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    with pytest.raises(EngineError, match="in use"):
        store.forget_elsewhere(FINGERPRINT, owned, set())
    tier.close()
    store.close()


def test_scrubbing_removes_what_evicted_blocks_have_left(home: Path) -> None:
    store = open_store(home)
    for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
        fill(store, chain(4, seed=fingerprint[0] + 1), fingerprint)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    evicted = [copy for copy in tier.copies() if copy.record.position >= 2]
    tier.remove(evicted, is_forgotten=False)
    assert tier.flush(30)
    image = chain(4, seed=1)[3].image
    assert image[:64] in all_bytes(home), "evicted blocks are only overwritten"
    store.scrub()
    assert image[:64] not in all_bytes(home)
    assert len(tier.copies()) == 2
    store.close()


def test_pruning_removes_the_slabs_of_models_that_are_gone(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(3, seed=1), FINGERPRINT, sha256="a")
    fill(store, chain(5, seed=2), OTHER_FINGERPRINT, sha256="b")
    (home / "left.tmp").write_bytes(b"x" * 10_000)
    result = store.prune({"a", "c"})
    assert (result.num_slabs, result.num_blocks, result.num_files) == (1, 5, 1)
    assert result.freed_bytes >= 5 * SLOT_BYTES
    assert [slab.fingerprint for slab in store.status().slabs] == [FINGERPRINT]
    store.close()


def test_clearing_leaves_nothing(home: Path) -> None:
    blocks, others = chain(5, seed=1, extra=b"secret salt"), chain(5, seed=2)
    store = open_store(home)
    fill(store, others, OTHER_FINGERPRINT)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, blocks)
    store.put_run(FINGERPRINT, b"r" * 16, blocks[-1].name, [77777, 88888, 99999])
    store.set_constant("rate", 1)
    assert store.find_run(b"r" * 16) == (77777, 88888, 99999)
    assert store.clear() == 10
    assert store.find_run(b"r" * 16) is None
    assert list(tier.copies()) == []
    left = all_bytes(home)
    for block in [*blocks, *others]:
        assert block.record.packed_ids not in left
        assert block.name not in left
        assert block.image[:64] not in left
    assert store.constant("rate") == 1
    fill_open(tier, blocks)
    store.close()
    store = open_store(home)
    assert stored_names(store) == names(blocks)
    store.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_verifying_finds_and_removes_bad_records(home: Path, is_open: bool) -> None:
    blocks, others = chain(6, seed=1), chain(3, seed=2)
    store = open_store(home)
    fill(store, others, OTHER_FINGERPRINT)
    fill(store, blocks)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha") if is_open else None
    path = home / f"{FINGERPRINT.hex()}.slab"
    content = path.read_bytes()
    at = content.index(blocks[3].image[:64])
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\0")
    told: list[tuple[int, int]] = []
    result = store.verify(lambda done, total: told.append((done, total)), lambda: False)
    assert told == [(number, 9) for number in range(1, 10)]
    assert (result.num_checked, result.num_damaged, result.damaged) == (9, 1, {blocks[3].name})
    assert result.is_complete
    if tier is not None:
        assert tier.flush(30)
        tier.close()
    assert stored_names(store) == names(blocks[:3])
    assert stored_names(store, OTHER_FINGERPRINT) == names(others)
    assert not store.verify(lambda *_: None, lambda: True).is_complete
    store.close()


def test_verifying_beside_a_writer_finds_nothing_bad(home: Path) -> None:
    """Slots are erased and reused while they are read."""
    store = open_store(home)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, chain(40, seed=0))
    is_over = threading.Event()

    def write() -> None:
        for seed in range(1, 12):
            tier.remove([copy for copy in tier.copies() if copy.record.position >= 3], is_forgotten=False)
            fill_open(tier, chain(37, seed=seed))
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        assert store.verify(lambda *_: None, lambda: False).num_damaged == 0
    writer.join()
    store.close()
