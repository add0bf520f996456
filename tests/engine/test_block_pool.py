from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.block_hash import pack_ids
from chatkv.engine.block_pool import Block, BlockPool, FreeBlockQueue
from chatkv.engine.block_tree import BlockNode, BlockTree


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "pop", "remove"]), st.integers(0, 7)), max_size=80))
def test_the_free_queue_is_a_list_with_constant_time_removal(actions: list[tuple[str, int]]) -> None:
    blocks = [Block(block_id) for block_id in range(8)]
    queue, model = FreeBlockQueue(blocks[:4]), list(blocks[:4])
    for action, index in actions:
        block = blocks[index]
        if action == "append" and block not in model:
            queue.append(block)
            model.append(block)
        elif action == "prepend" and block not in model:
            queue.prepend(block)
            model.insert(0, block)
        elif action == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif action == "pop" and model:
            assert queue.pop() is model.pop(0)
        assert list(queue) == model
        assert len(queue) == len(model)


class Chains:
    """A pool with chains of cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.tree = BlockTree(b"root")
        self.poisoned: list[int] = []
        self.pool = BlockPool(num_blocks, self.tree, self.poisoned.append)

    def hold(self, name: str, num_blocks: int, parent: BlockNode | None = None) -> list[int]:
        block_ids = self.pool.allocate(num_blocks)
        node = parent or self.tree.root
        for index, block_id in enumerate(block_ids):
            ids = tuple(ord(name) * 100 + index for _ in range(16))
            node = self.tree.find_or_add(node, f"{name}{index}".encode(), pack_ids(ids), b"")
            self.pool.cache_full_block(block_id, node)
        return block_ids

    def cached(self, block_id: int) -> BlockNode:
        node = self.pool.blocks[block_id].node
        assert node is not None
        return node


def test_a_finished_chain_is_evicted_from_its_tail_and_stays_whole_below() -> None:
    chains = Chains(4)
    block_ids = chains.hold("a", 4)
    chains.pool.free(block_ids)
    for num_left in (3, 2, 1, 0):
        (taken,) = chains.pool.allocate(1)
        assert taken == block_ids[num_left]
        assert len(chains.tree.nodes()) == num_left
        chains.tree.check_integrity()


def test_a_shared_head_outlives_the_tails() -> None:
    chains = Chains(5)
    head = chains.hold("h", 1)
    parent = chains.cached(head[0])
    left, right = chains.hold("l", 2, parent), chains.hold("r", 2, parent)
    chains.pool.touch(head)
    chains.pool.free(head + left)
    chains.pool.check_integrity(dict.fromkeys(head + right, 1))
    chains.pool.free(head + right)
    assert chains.pool.allocate(5) == [left[1], left[0], right[1], right[0], head[0]]


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    chains = Chains(3)
    kept = chains.hold("a", 1)
    blank = chains.pool.allocate(1)
    chains.pool.free(kept)
    chains.pool.free(blank)
    assert chains.pool.num_cached_free == 1
    assert kept[0] not in chains.pool.allocate(2)
    assert chains.pool.num_cached_free == 1


def test_touch_takes_a_block_out_of_the_middle_and_counts_holders() -> None:
    chains = Chains(4)
    block_ids = chains.hold("a", 3)
    chains.pool.free(block_ids)
    chains.pool.touch(block_ids[:2])
    chains.pool.touch(block_ids[:1])
    chains.pool.check_integrity({block_ids[0]: 2, block_ids[1]: 1})
    assert chains.pool.num_free == 2


def test_content_is_poisoned_when_it_becomes_meaningless_and_not_before() -> None:
    chains = Chains(2)
    cached = chains.hold("a", 1)
    blank = chains.pool.allocate(1)
    chains.pool.free(cached)
    assert chains.poisoned == []
    chains.pool.free(blank)
    assert chains.poisoned == blank
    chains.pool.allocate(2)
    assert chains.poisoned == blank + cached


def test_freeing_twice_and_asking_for_too_much_are_caught() -> None:
    pool = BlockPool(2, BlockTree(b"root"))
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_check_integrity_notices_a_lost_holder() -> None:
    pool = BlockPool(2, BlockTree(b"root"))
    (block_id,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="ref_cnt 1, 2 holders"):
        pool.check_integrity({block_id: 2})


def test_c8_what_is_given_back_during_a_step_is_free_when_the_step_is_over() -> None:
    chains = Chains(6)
    pool = chains.pool
    early, late = chains.hold("a", 2), chains.hold("b", 2)
    pool.begin_step()
    pool.free(early)
    pool.begin_step()
    pool.free(late)
    assert (pool.num_free, pool.is_settled) == (2, False)
    pool.check_integrity(Counter(pool.deferred_block_ids()))
    pool.end_step()
    assert pool.num_free == 4
    assert sorted(pool.deferred_block_ids()) == late
    pool.end_step()
    assert (pool.num_free, pool.is_settled) == (6, True)
    assert pool.allocate(6)[2:] == [*early[::-1], *late[::-1]], "the order in which they were given back"


def test_c8_a_block_given_back_during_a_step_is_blank_only_when_the_step_is_over() -> None:
    chains = Chains(2)
    block_ids = chains.pool.allocate(1)
    chains.pool.begin_step()
    chains.pool.free(block_ids)
    assert chains.poisoned == []
    chains.pool.end_step()
    assert chains.poisoned == block_ids


def test_c8_a_block_given_back_during_a_step_may_be_hit_again() -> None:
    chains = Chains(2)
    block_ids = chains.hold("a", 2)
    chains.pool.begin_step()
    chains.pool.free(block_ids)
    chains.pool.touch(block_ids)
    chains.pool.end_step()
    chains.pool.check_integrity(dict.fromkeys(block_ids, 1))
    assert chains.pool.num_free == 0


def test_c8_what_a_copy_reads_is_not_evicted() -> None:
    chains = Chains(3)
    block_ids = chains.hold("a", 2)
    chains.pool.begin_copy(block_ids)
    chains.pool.free(block_ids)
    assert (chains.pool.num_free, chains.pool.is_settled) == (1, False)
    chains.pool.end_copy(block_ids)
    assert (chains.pool.num_free, chains.pool.is_settled) == (3, True)
    chains.pool.check_integrity({})
