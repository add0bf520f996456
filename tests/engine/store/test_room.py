"""What the quota covers, and what goes when there is no room."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest
from store_blocks import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    allocated,
    chain,
    fill,
    names,
    open_store,
    stored_names,
    with_blocks,
)

from chatkv.engine.errors import EngineError, StoreUnavailableError
from chatkv.engine.store.index import StoreIndex
from chatkv.engine.store.space import INDEX_RESERVE_BYTES


def test_what_does_not_fit_goes_at_opening_coldest_first(home: Path) -> None:
    now_s = [1000.0]
    store = open_store(home, clock=lambda: now_s[0])
    for seed in range(1, 5):
        now_s[0] += 3600
        fill(store, chain(20, seed=seed), FINGERPRINT if seed % 2 else OTHER_FINGERPRINT)
    store.close()
    quota = INDEX_RESERVE_BYTES + 45 * SLOT_BYTES + 200_000
    store = open_store(home, quota_bytes=quota, clock=lambda: now_s[0])
    assert allocated(home) <= quota
    kept = stored_names(store) | stored_names(store, OTHER_FINGERPRINT)
    assert names(chain(20, seed=4) + chain(20, seed=3)) <= kept
    assert not names(chain(20, seed=1)) & kept
    store.close()


def test_pinned_blocks_of_other_models_stay(home: Path) -> None:
    pinned, loose = chain(10, seed=1), chain(10, seed=2)
    store = open_store(home, pinned_in=lambda fingerprint: names(pinned) if fingerprint == FINGERPRINT else ())
    fill(store, [*pinned, *loose])
    assert store.evict_elsewhere(1 << 30) >= 10 * PAYLOAD_BYTES
    assert store.oldest_elsewhere() is None
    assert stored_names(store) == names(pinned)
    store.close()


def test_nobody_is_asked_what_is_pinned_where_nothing_is_colder(home: Path) -> None:
    asked: list[bytes] = []

    def pinned_in(fingerprint: bytes) -> tuple[bytes, ...]:
        asked.append(fingerprint)
        return ()

    store = open_store(home, pinned_in=pinned_in, clock=lambda: 5000.0)
    fill(store, chain(3))
    assert store.oldest_elsewhere(4000.0) is None
    assert not asked
    assert store.oldest_elsewhere(6000.0) is not None
    assert asked == [FINGERPRINT]
    store.close()


def test_what_newer_blocks_of_the_same_weights_have_replaced_goes_first(home: Path) -> None:
    now_s = [1000.0]
    store = open_store(home, clock=lambda: now_s[0])
    third = bytes(range(64, 96))
    fill(store, chain(3, seed=1), third, sha256="other weights")
    now_s[0] = 2000.0
    fill(store, chain(3, seed=2), OTHER_FINGERPRINT)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    assert store.oldest_elsewhere() == 0.0
    store.evict_elsewhere(3 * SLOT_BYTES)
    assert [slab.fingerprint for slab in store.status().slabs] == [third, FINGERPRINT]
    assert store.oldest_elsewhere() == pytest.approx(1000.0, abs=10)
    tier.close()
    assert store.oldest_elsewhere() == pytest.approx(1000.0, abs=10)
    store.close()


def test_a_clock_that_was_set_back_keeps_nothing_from_being_evicted(home: Path) -> None:
    now_s = [2_000_000_000.0]
    store = open_store(home, clock=lambda: now_s[0])
    fill(store, chain(2, seed=1))
    now_s[0] = 1_000_000_000.0
    oldest = store.oldest_elsewhere()
    assert oldest is not None
    assert oldest <= now_s[0]
    store.close()


def test_a_rebuild_that_was_interrupted_is_done_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(home)
    (home / "index.db").unlink()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(StoreIndex, "add_rows", fail)
        with pytest.raises(StoreUnavailableError, match="broken"):
            open_store(home)
    store = open_store(home)
    assert stored_names(store) == names(chain(3))
    store.close()


def test_leaves_go_before_what_is_above_them(home: Path) -> None:
    stem = chain(4, seed=1)
    branch = chain(2, seed=2, parent=stem[1])
    store = open_store(home)
    fill(store, [*stem, *branch])
    for _ in range(5):
        assert store.evict_elsewhere(1) >= PAYLOAD_BYTES
        left = stored_names(store)
        assert all(above.name in left for above, below in pairwise(stem) if below.name in left)
        assert branch[0].name in left or branch[1].name not in left
    assert left == {stem[0].name}
    store.evict_elsewhere(1)
    assert store.status().slabs == (), "an empty slab goes as a whole"
    store.close()


def test_the_open_tier_is_not_evicted_from_outside(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(3, seed=1))
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    assert store.oldest_elsewhere() is None
    assert store.evict_elsewhere(1 << 30) == 0
    assert len(tier.copies()) == 3
    with pytest.raises(EngineError, match="in use"):
        store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    store.close()


def test_d1_lowering_the_quota_shrinks_the_directory(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(100, seed=1), OTHER_FINGERPRINT)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    for block in chain(100, seed=2):
        above = {copy.record.block_hash: copy for copy in tier.copies()}.get(block.record.parent_hash)
        assert tier.store(block.record, above, memoryview(block.image), list, False)
        assert tier.flush(30)
    for num_blocks in (150, 60, 10):
        quota = INDEX_RESERVE_BYTES + num_blocks * SLOT_BYTES + 400_000
        store.set_quota(quota)
        assert allocated(home) <= quota
        assert 0 < len(tier.copies()) <= num_blocks + 34
    store.close()
