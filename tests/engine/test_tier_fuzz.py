"""Random work over three tiers: every answer is what the request is answered alone, every copy in every tier is what
its node says, every invariant holds after every step. Seeded bugs must be caught, else the check is worth nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_tier import FakeTier
from tier_fuzz import TierFuzz

from chatkv.engine import loads
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.block_pool import BlockPool
from chatkv.engine.forgetting import Forgetting
from chatkv.engine.kv_cache import KVCacheManager
from chatkv.engine.loads import LoadSet
from chatkv.engine.queues import Queues
from chatkv.engine.tiers.pins import Pins
from chatkv.engine.tiers.tier_manager import TierManager
from chatkv.engine.tiers.tier_slot import TierSlot


@pytest.mark.parametrize("seed", range(3))
def test_d7_fuzz_over_three_tiers_equals_the_naive_model(seed: int) -> None:
    fuzz = TierFuzz(seed)
    fuzz.run(1000)
    events = (
        *(
            "preempted",
            "hit device",
            "hit host",
            "hit disk",
            "cancelled",
            "stop",
            "length",
            "gave up",
            "loading",
            "cancelled loads",
        ),
        *("warm load", "warm compute", "forgotten", "shared", "offloaded", "skipped host", "skipped disk"),
    )
    for event in events:
        assert fuzz.seen[event] > 2, f"the fuzz hardly ever meets {event!r}: {fuzz.seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_d7_fuzz_over_tiers_more_seeds(seed: int) -> None:
    disk = FakeTier("disk", capacity=5 + seed % 70, queue_limit=1 + seed % 9, is_prompt=False)
    TierFuzz(seed, num_blocks=10 + seed % 30, tiers=[disk]).run(2500)


class CollidingHasher(BlockHasher):
    """Every block has the same name."""

    def _digest(self, message: bytes) -> bytes:
        return b"same"


def test_c1_a_hash_that_always_collides_is_harmless_across_tiers() -> None:
    fuzz = TierFuzz(1, hasher=CollidingHasher(b"", CacheFingerprint(b"")))
    fuzz.run(700)
    assert fuzz.seen["hit disk"] + fuzz.seen["hit host"] > 20


@pytest.mark.parametrize("shift", [1, -1])
def test_c11_a_tier_shifted_by_one_is_caught(shift: int) -> None:
    disk = FakeTier("disk", is_prompt=False)
    disk.shift = shift
    with pytest.raises(AssertionError):
        TierFuzz(0, tiers=[disk]).run(1000)


def _cancel_keeps_the_reservation(self: LoadSet, sequence) -> None:  # type: ignore[no-untyped-def]
    self._loads[sequence].block_ids.clear()
    ORIGINAL_CANCEL(self, sequence)


def _cancel_lets_the_read_go_on(load) -> None:  # type: ignore[no-untyped-def]
    load.ready.clear()


def _place_releases_first(self: LoadSet, load) -> None:  # type: ignore[no-untyped-def]
    load.parts[0].job.release(load.ready[0])
    load.parts[0].job.buffers.append(load.ready[0].obj)
    ORIGINAL_PLACE(self, load)


def _write_into_the_next_block(self: LoadSet, load) -> None:  # type: ignore[no-untyped-def]
    images = self._images
    self._images = _Shifted(images, self._kv.pool.num_blocks)
    ORIGINAL_PLACE(self, load)
    self._images = images


class _Shifted:
    def __init__(self, images, num_blocks: int) -> None:  # type: ignore[no-untyped-def]
        self.images, self.num_blocks, self.image_bytes = images, num_blocks, images.image_bytes

    def write(self, block_id: int, image: memoryview) -> None:
        self.images.write((block_id + 1) % self.num_blocks, image)


def _load_publishes_one_block_too_many(self: KVCacheManager, sequence, block_id: int) -> None:  # type: ignore[no-untyped-def]
    ORIGINAL_PLACE_LOADED(self, sequence, block_id)
    sequence.num_computed_tokens = min(sequence.num_computed_tokens + 16, sequence.num_skippable_tokens)


def _hits_of_lower_tiers_are_taken_for_device_hits(self: KVCacheManager, sequence):  # type: ignore[no-untyped-def]
    hit = ORIGINAL_HIT(self, sequence)
    hit.device.extend(hit.lower[:1])
    del hit.lower[:1]
    return hit


def _hold_lets_transient_blocks_out(self: TierManager, nodes, owner: str, is_transient: bool) -> None:  # type: ignore[no-untyped-def]
    ORIGINAL_HOLD(self, nodes, owner, False)


def _hold_forgets_the_owner(self: TierManager, nodes, owner: str, is_transient: bool) -> None:  # type: ignore[no-untyped-def]
    ORIGINAL_HOLD(self, nodes, "", is_transient)


def _lose_the_copy_alone(self: TierManager, slot, copy) -> None:  # type: ignore[no-untyped-def]
    node = self._node_of(slot, copy)
    if node is not None:
        slot.set_copy(node, None)
        if not node.children:
            self._tree.drop_if_empty(node)


def _ignore_what_is_lost(self: TierManager, slot, copy) -> None:  # type: ignore[no-untyped-def]
    pass


def _store_without_the_chain_before(self: TierSlot, node):  # type: ignore[no-untyped-def]
    return ORIGINAL_MISSING(self, node)[-1:]


def _store_what_is_stored_again(self: TierSlot, node):  # type: ignore[no-untyped-def]
    return ORIGINAL_MISSING(self, node) or [node]


def _forget_what_is_held(self: Forgetting, node, owner, shared) -> bool:  # type: ignore[no-untyped-def]
    return node.block_hash in shared


def _forget_the_lower_tiers_only(self: BlockPool, node) -> None:  # type: ignore[no-untyped-def]
    if node.host_copy is None and node.disk_copy is None:
        return
    ORIGINAL_DROP(self, node)


def _a_dropped_block_is_still_cached(self: BlockPool, node) -> None:  # type: ignore[no-untyped-def]
    self._free_queue.remove(self.blocks[node.device_block_id])
    self._evict(self.blocks[node.device_block_id])


def _pins_outlive_their_node(self: Pins, node) -> None:  # type: ignore[no-untyped-def]
    pass


def _who_loads_counts_as_running(self: Queues, sequence) -> None:  # type: ignore[no-untyped-def]
    self.run(sequence)


ORIGINAL_CANCEL = LoadSet.cancel
ORIGINAL_PLACE = LoadSet._place
ORIGINAL_PLACE_LOADED = KVCacheManager.place_loaded
ORIGINAL_HIT = KVCacheManager.longest_hit
ORIGINAL_HOLD = TierManager.hold
ORIGINAL_MISSING = TierSlot.missing_chain
ORIGINAL_DROP = BlockPool.drop

SEEDED_BUGS: list[tuple[object, str, Callable]] = [
    (LoadSet, "cancel", _cancel_keeps_the_reservation),
    (loads, "_stop", _cancel_lets_the_read_go_on),
    (LoadSet, "_place", _place_releases_first),
    (LoadSet, "_place", _write_into_the_next_block),
    (KVCacheManager, "place_loaded", _load_publishes_one_block_too_many),
    (KVCacheManager, "longest_hit", _hits_of_lower_tiers_are_taken_for_device_hits),
    (TierManager, "hold", _hold_lets_transient_blocks_out),
    (TierManager, "hold", _hold_forgets_the_owner),
    (TierManager, "_lose", _lose_the_copy_alone),
    (TierManager, "_lose", _ignore_what_is_lost),
    (TierSlot, "missing_chain", _store_without_the_chain_before),
    (TierSlot, "missing_chain", _store_what_is_stored_again),
    (Forgetting, "_is_protected", _forget_what_is_held),
    (BlockPool, "drop", _forget_the_lower_tiers_only),
    (BlockPool, "drop", _a_dropped_block_is_still_cached),
    (Pins, "release", _pins_outlive_their_node),
    (Queues, "load", _who_loads_counts_as_running),
]


@pytest.mark.parametrize(("owner", "name", "bug"), SEEDED_BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_fuzz_catches_a_seeded_bug(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: Callable) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError)):
        TierFuzz(0).run(1000)
