"""The host tier: one slab, stores and loads at once."""

from __future__ import annotations

import resource

import pytest
from tier_blocks import IMAGE_BYTES, Changes, chain, image, load_all, record, store_chain

from chatkv.engine.tiers.host_tier import HostTier
from chatkv.engine.tiers.tier import CopyState

CHANGES = Changes()


def make_tier(num_blocks: int) -> HostTier:
    return HostTier(IMAGE_BYTES, num_blocks * IMAGE_BYTES)


def test_a_chain_comes_back_as_it_went_in() -> None:
    tier = make_tier(8)
    records = chain(5)
    copies = store_chain(tier, records)
    assert [copy.state for copy in copies] == [CopyState.STORED] * 5
    assert list(tier.poll()) == copies
    assert load_all(tier.start_load(copies[1:], 1.0), CHANGES) == [bytes(image(one)) for one in records[1:]]
    assert tier.copies() == copies
    assert tier.stats().num_loaded == 4
    assert tier.stats().read_bytes_per_s > 0


def test_a_load_that_is_ready_at_once_says_so() -> None:
    tier = make_tier(2)
    copies = store_chain(tier, chain(1))
    calls: list[None] = []
    tier.on_change = lambda: calls.append(None)
    job = tier.start_load(copies, 1.0)
    assert len(calls) == 1, "an engine without other work sleeps until it is called"
    assert len(job.take()) == 1


def test_b2_a_tier_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no block"):
        HostTier(IMAGE_BYTES, IMAGE_BYTES - 1)


def test_full_it_evicts_the_leaf_worth_least() -> None:
    tier = make_tier(4)
    old, new = store_chain(tier, chain(2, 1)), store_chain(tier, chain(2, 2))
    tier.touch(old)
    tier.poll()
    third = store_chain(tier, chain(1, 3))
    assert list(tier.poll()) == [new[1], *third]
    assert new[1].state is CopyState.GONE
    assert tier.stats().num_evicted == 1
    assert tier.stats().used_bytes == tier.stats().limit_bytes


def test_all_pinned_it_refuses_and_says_so() -> None:
    tier = make_tier(2)
    pinned = store_chain(tier, chain(2, 1), is_pinned=True)
    assert store_chain(tier, chain(1, 2)) == []
    assert "pinned" in (tier.stats().notice or "")
    assert tier.stats().num_skipped == 1
    tier.pin(pinned, False)
    assert len(store_chain(tier, chain(1, 2))) == 1
    assert tier.stats().notice is None


def test_a_chain_longer_than_the_tier_keeps_its_head() -> None:
    tier = make_tier(3)
    copies = store_chain(tier, chain(5))
    assert len(copies) == 3
    assert all(copy.state is CopyState.STORED for copy in copies)


def test_c8_images_given_out_are_not_overwritten_before_they_come_back() -> None:
    tier = make_tier(1)
    (copy,) = store_chain(tier, chain(1, 1))
    job = tier.start_load([copy], 1.0)
    (view,) = job.take()
    assert job.is_done
    assert store_chain(tier, chain(1, 2)) == []
    tier.remove([copy], is_forgotten=False)
    assert store_chain(tier, chain(1, 2)) == []
    assert bytes(view) == bytes(image(copy.record))
    job.release(view)
    assert len(store_chain(tier, chain(1, 2))) == 1


def test_a_cancelled_load_lets_go_of_its_copies() -> None:
    tier = make_tier(2)
    copies = store_chain(tier, chain(2, 1))
    job = tier.start_load(copies, 1.0)
    job.cancel()
    assert job.is_done
    assert job.take() == []
    assert len(store_chain(tier, chain(2, 2))) == 2


def test_removed_copies_go_with_all_below_and_end_a_load_that_wants_them() -> None:
    tier = make_tier(8)
    copies = store_chain(tier, chain(4))
    job = tier.start_load(copies, 1.0)
    tier.remove(copies[2:3], is_forgotten=True)
    assert [copy.state for copy in copies[2:]] == [CopyState.GONE] * 2
    assert load_all(job, CHANGES) == [bytes(image(copy.record)) for copy in copies[:2]]
    child = record(3, 9, copies[2].record)
    assert tier.store(child, copies[2], image(child), list, False) is None
    assert len(store_chain(tier, chain(6, 5))) == 6


def test_a_forgotten_image_is_wiped_when_its_last_reader_is_done() -> None:
    tier = make_tier(2)
    (copy,) = store_chain(tier, chain(1))
    job = tier.start_load([copy], 1.0)
    (view,) = job.take()
    tier.remove([copy], is_forgotten=True)
    assert bytes(view) == bytes(image(copy.record))
    job.release(view)
    assert not any(view)


def test_d2_its_memory_is_taken_once_and_does_not_grow() -> None:
    tier = make_tier(64)
    store_chain(tier, chain(64))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1, 501):
        assert store_chain(tier, chain(2, number))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 4096
    assert tier.stats().num_blocks == 64
