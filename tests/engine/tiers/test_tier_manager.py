"""Storing: what, when, how often, and what happens when a tier refuses or loses something."""

from __future__ import annotations

import pytest
from fake_tier import FakeTier
from harness import GREEDY_10, Harness, prompt
from test_loads import ONE, evict_all

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.tiers.tier import BlockRecord, CopyState, TierCopy


def positions(tier: FakeTier) -> list[int]:
    return sorted(copy.record.position for copy in tier.images)


def test_c12_prompts_and_answers_are_stored_once_each() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    answer = h.ask("a", prompt(40), GREEDY_10, owner="chat")
    h.ask("b", prompt(40) + tuple(answer.token_ids) + prompt(50, first=2), owner="chat")
    assert positions(disk) == list(range(6))
    assert set(disk.num_written.values()) == {1}
    records = {copy.record.position: copy.record for copy in disk.images}
    assert records[2].token_ids == (prompt(40) + tuple(answer.token_ids))[32:48]
    assert records[2].parent_hash == records[1].block_hash


def test_what_a_full_queue_skipped_is_stored_when_it_drains() -> None:
    disk = FakeTier(queue_limit=2, is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    assert positions(disk) == [0, 1]
    assert h.engine.is_waiting is False
    h.step()
    assert h.engine.is_waiting, "a tier that refuses is not asked in a loop"
    for num_stored in (4, 6):
        disk.flush(1)
        h.step()
        assert positions(disk) == list(range(num_stored))
    disk.flush(1)
    h.step()
    assert h.engine.is_waiting
    assert set(disk.num_written.values()) == {1}


def test_a_skipped_block_that_has_left_the_device_is_skipped_for_good() -> None:
    disk = FakeTier(queue_limit=1, is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    evict_all(h)
    disk.flush(1)
    h.step()
    assert positions(disk) == [0]
    assert h.engine.tiers.num_unstored == 0


def test_blocks_that_a_tier_refuses_for_ever_do_not_pile_up() -> None:
    disk = FakeTier(capacity=0)
    h = Harness(num_blocks=16, max_context_tokens=256, tiers=[disk])
    for first in range(2, 60):
        h.ask(f"{first}", prompt(90, first=first), ONE)
    assert h.engine.tiers.num_unstored < 200
    h.engine.close()


def test_a_damaged_copy_with_a_live_device_copy_is_stored_again() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    disk.lose(next(copy for copy in disk.images if copy.record.position == 2))
    h.step()
    assert positions(disk) == list(range(6))


def test_an_evicted_copy_with_a_live_device_copy_is_stored_again_when_it_is_used() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    for copy in list(disk.images)[:1:-1]:
        disk.evict(copy)
    h.step()
    assert positions(disk) == [0, 1]
    assert h.engine.is_waiting, "what was evicted is not written again by itself"
    h.ask("b", prompt(100), ONE)
    assert positions(disk) == list(range(6))


def test_blocks_that_left_the_device_before_they_were_safe_are_waited_for() -> None:
    disk = FakeTier(is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    evict_all(h)
    h.add("b", prompt(100), ONE)
    h.step()
    assert disk.num_hurried == 1
    assert h.engine.is_waiting
    assert 0 < (h.engine.wait_s or 0) <= 0.5
    disk.flush(1)
    disk.is_prompt = True
    h.run()
    assert h.answers["b", 0].num_cached_tokens == 96


def test_a_copy_that_never_came_to_be_safe_is_no_hit() -> None:
    disk = FakeTier(is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    evict_all(h)
    h.ask("b", prompt(100), ONE)
    assert h.answers["b", 0].num_cached_tokens == 0, "queued copies cannot be loaded"
    evict_all(h)
    for copy in disk.queued[3:4]:
        disk.lose(copy)
    disk.flush(1)
    h.step()
    assert len(h.engine.kv.tree.nodes()) == 3
    disk.is_prompt = True
    assert dict(h.ask("c", prompt(100), ONE).outputs[-1].cached_by_tier) == {"disk": 48}


def test_a_small_tier_keeps_the_head_of_a_long_chain() -> None:
    disk = FakeTier(capacity=4)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    assert positions(disk) == [0, 1, 2, 3]
    assert disk.num_written.total() == 4


def test_what_comes_from_disk_is_given_to_the_host_too() -> None:
    host, disk = FakeTier("host"), FakeTier("disk")
    Harness(tiers=[disk]).ask("a", prompt(100), ONE)
    h = Harness(tiers=[host, disk])
    assert dict(h.ask("b", prompt(100), ONE).outputs[-1].cached_by_tier) == {"disk": 96}
    assert positions(host) == list(range(6))
    evict_all(h)
    assert dict(h.ask("c", prompt(100), ONE).outputs[-1].cached_by_tier) == {"host": 96}


class CollidingHasher(BlockHasher):
    def _digest(self, message: bytes) -> bytes:
        return b"same"


def test_c1_equal_names_are_harmless_across_tiers() -> None:
    disk = FakeTier()
    hasher = CollidingHasher(b"", CacheFingerprint(b""))
    h = Harness(tiers=[disk], hasher=hasher)
    h.ask("a", prompt(16, first=2) + prompt(32), ONE)
    h.ask("b", prompt(16, first=3) + prompt(16) + prompt(16, first=4), ONE)
    later = Harness(tiers=[disk], hasher=hasher)
    assert later.ask("c", prompt(16, first=3) + prompt(32), ONE).num_cached_tokens == 32
    assert later.ask("d", prompt(32), ONE).num_cached_tokens == 0
    assert later.ask("e", prompt(16, first=2) + prompt(40), ONE).num_cached_tokens == 48


def wrong(record: BlockRecord, **changes: object) -> BlockRecord:
    return record._replace(**changes)


@pytest.mark.parametrize("change", [{"parent_hash": b"x" * 16}, {"position": 7}])
def test_a_stored_copy_that_fits_nowhere_is_removed(change: dict[str, object]) -> None:
    disk = FakeTier()
    Harness(tiers=[disk]).ask("a", prompt(64), ONE)
    bad = next(copy for copy in disk.images if copy.record.position == 2)
    bad.record = wrong(bad.record, **change)
    h = Harness(tiers=[disk])
    h.engine.check_integrity()
    assert bad.state is CopyState.GONE
    assert h.ask("b", prompt(64), ONE).num_cached_tokens == 32


def test_duplicates_of_a_block_are_reduced_to_one() -> None:
    disk = FakeTier()
    Harness(tiers=[disk]).ask("a", prompt(64), ONE)
    first = disk.copies()[0]
    twin = TierCopy(first.record, None, 99, CopyState.STORED)
    disk.images[twin] = disk.images[first]
    h = Harness(tiers=[disk])
    h.engine.check_integrity()
    assert twin.state is CopyState.GONE
    assert h.ask("b", prompt(64), ONE).num_cached_tokens == 63


def test_a_write_that_ends_after_a_reset_is_taken_over() -> None:
    disk = FakeTier(is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(64), ONE)
    h.engine.reset()
    disk.flush(1)
    h.step()
    h.engine.check_integrity()
    assert h.engine.place_tokens(prompt(64)).num_by_run == [("disk", 4)]


def test_closing_stores_what_is_left() -> None:
    disk = FakeTier(queue_limit=2, is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    h.engine.close()
    assert positions(disk) == list(range(6))
    assert not disk.queued
    assert disk.is_closed


def test_a_copy_that_becomes_safe_after_a_reset_is_pinned_like_its_node() -> None:
    disk = FakeTier(is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(40), ONE, owner="chat")
    assert len(disk.queued) == 2
    h.engine.set_pinned("chat", (), is_pinned=True)
    h.engine.reset()
    disk.is_refusing = True
    for block_id in range(64):
        h.runner.poison(block_id)
    h.ask("b", prompt(40), ONE, owner="chat")
    disk.flush(1)
    h.step()
    assert [copy.num_pins for copy in disk.images] == [1, 1]
    h.engine.set_pinned("chat", (), is_pinned=False)
    assert [copy.num_pins for copy in disk.images] == [0, 0]
