"""Random work on a pool far too small: every answer is what the request is answered alone, and every invariant of pool,
tree and tables holds after every step. Seeded bugs must be caught, else the check is worth nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz import Fuzz

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.block_pool import BlockPool
from chatkv.engine.block_tree import BlockTree
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.kv_cache import KVCacheManager
from chatkv.engine.scheduler import Scheduler
from chatkv.engine.step_runner import StepRunner


@pytest.mark.parametrize("seed", range(6))
def test_d7_fuzz_equals_the_naive_model(seed: int) -> None:
    fuzz = Fuzz(seed)
    fuzz.run(2000)
    assert fuzz.num_steps >= 2000
    for event in ("preempted", "hit", "cancels", "cancelled", "stop", "length"):
        assert fuzz.seen[event] > 20, f"the fuzz hardly ever meets {event!r}: {fuzz.seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_d7_fuzz_more_seeds(seed: int) -> None:
    Fuzz(seed, num_blocks=10 + seed % 30).run(3000)


class CollidingHasher(BlockHasher):
    """Every block has the same name."""

    def _digest(self, message: bytes) -> bytes:
        return b"same"


def test_c1_a_hash_that_always_collides_is_harmless() -> None:
    fuzz = Fuzz(1, hasher=CollidingHasher(b"", CacheFingerprint(b"")))
    fuzz.run(1500)
    assert fuzz.seen["hit"] > 20


def _touch_counts_free_blocks_only(self: BlockPool, block_ids: list[int]) -> None:
    for block_id in block_ids:
        if self.is_free(block_id):
            ORIGINAL_TOUCH(self, [block_id])


def _publish_partly_filled_block(self: KVCacheManager, sequence) -> None:  # type: ignore[no-untyped-def]
    num_computed = sequence.num_computed_tokens
    sequence.num_computed_tokens = -(-num_computed // BLOCK_SIZE) * BLOCK_SIZE
    ORIGINAL_PUBLISH(self, sequence)
    sequence.num_computed_tokens = num_computed


def _find_ignores_parent(self: BlockTree, parent, block_hash, packed_ids, extra):  # type: ignore[no-untyped-def]
    return next((node for node in self.nodes() if node.packed_ids == packed_ids), None)


def _free_head_first(self: BlockPool, block_ids: list[int], is_used: bool = True) -> None:
    ORIGINAL_FREE(self, block_ids[::-1], is_used)


def _fork_without_copy(self: KVCacheManager, parent, child) -> bool:  # type: ignore[no-untyped-def]
    is_forked = ORIGINAL_FORK(self, parent, child)
    self.finish_copy(child)
    return is_forked


def _write_into_shared_blocks(self: KVCacheManager, sequence, start, stop, no_slot):  # type: ignore[no-untyped-def]
    table = sequence.block_table
    return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]


def _finish_keeps_blocks(self: Scheduler, sequence) -> None:  # type: ignore[no-untyped-def]
    self.queues.remove(sequence)
    sequence.active.sequences.remove(sequence)


def _publish_before_the_step(self: KVCacheManager, sequence, num_tokens) -> bool:  # type: ignore[no-untyped-def]
    is_allocated = ORIGINAL_ALLOCATE(self, sequence, num_tokens)
    if is_allocated:
        sequence.num_computed_tokens += num_tokens
        ORIGINAL_PUBLISH(self, sequence)
        sequence.num_computed_tokens -= num_tokens
    return is_allocated


def _reserve_ahead(self: KVCacheManager, sequence, num_tokens) -> bool:  # type: ignore[no-untyped-def]
    return ORIGINAL_ALLOCATE(self, sequence, num_tokens + 1)


def _noise_of_the_first_choice(sequence):  # type: ignore[no-untyped-def]
    return [ORIGINAL_SAMPLE_SPECS(sequence)[0]] * len(ORIGINAL_SAMPLE_SPECS(sequence))


ORIGINAL_TOUCH = BlockPool.touch
ORIGINAL_FREE = BlockPool.free
ORIGINAL_PUBLISH = KVCacheManager.publish
ORIGINAL_FORK = KVCacheManager.fork
ORIGINAL_ALLOCATE = KVCacheManager.allocate
ORIGINAL_SAMPLE_SPECS = StepRunner._sample_specs

SEEDED_BUGS: list[tuple[type, str, Callable]] = [
    (BlockPool, "touch", _touch_counts_free_blocks_only),
    (BlockPool, "free", _free_head_first),
    (BlockTree, "find", _find_ignores_parent),
    (KVCacheManager, "publish", _publish_partly_filled_block),
    (KVCacheManager, "fork", _fork_without_copy),
    (KVCacheManager, "slot_mapping", _write_into_shared_blocks),
    (KVCacheManager, "allocate", _publish_before_the_step),
    (KVCacheManager, "allocate", _reserve_ahead),
    (Scheduler, "finish", _finish_keeps_blocks),
    (StepRunner, "_sample_specs", staticmethod(_noise_of_the_first_choice)),
]


@pytest.mark.parametrize(("owner", "name", "bug"), SEEDED_BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_fuzz_catches_a_seeded_bug(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, bug: Callable) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        Fuzz(0).run(1000)


def test_integrity_alone_catches_what_answers_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bugs with the runner blind: a wrong ref count is found before it does harm."""
    monkeypatch.setattr(BlockPool, "touch", _touch_counts_free_blocks_only)
    fuzz = Fuzz(0)
    monkeypatch.setattr(fuzz, "_compare", lambda *args: None)
    with pytest.raises(AssertionError, match=r"ref_cnt|freed twice"):
        fuzz.run(1000)
