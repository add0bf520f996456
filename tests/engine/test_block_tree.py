from __future__ import annotations

import pytest

from chatkv.engine.block_hash import pack_ids
from chatkv.engine.block_tree import BlockNode, BlockTree

IDS = tuple(range(16))
SAME_HASH = b"always the same"


def add(tree: BlockTree, parent: BlockNode, token_ids: tuple[int, ...], extra: bytes = b"") -> BlockNode:
    node = tree.find_or_add(parent, SAME_HASH, pack_ids(token_ids), extra)
    node.device_block_id = len(tree.nodes())
    return node


def test_c1_equal_hashes_are_told_apart_by_parent_ids_and_extra() -> None:
    tree = BlockTree(b"root")
    first = add(tree, tree.root, IDS)
    below = add(tree, first, IDS)
    other_ids = add(tree, tree.root, IDS[::-1])
    salted = add(tree, tree.root, IDS, b"salt")
    assert len({first, below, other_ids, salted}) == 4
    assert tree.find(tree.root, SAME_HASH, pack_ids(IDS), b"") is first
    assert tree.find(first, SAME_HASH, pack_ids(IDS), b"") is below
    assert tree.find(below, SAME_HASH, pack_ids(IDS), b"") is None
    assert tree.find(tree.root, SAME_HASH, pack_ids(IDS[::-1]), b"") is other_ids
    assert tree.find(tree.root, SAME_HASH, pack_ids(IDS), b"salt") is salted
    tree.check_integrity()


def test_a_node_without_copies_leaves_and_its_namesakes_stay() -> None:
    tree = BlockTree(b"root")
    first, second = add(tree, tree.root, IDS), add(tree, tree.root, IDS[::-1])
    tree.drop_if_empty(first)
    assert tree.find(tree.root, SAME_HASH, pack_ids(IDS), b"") is first
    first.device_block_id = None
    tree.drop_if_empty(first)
    assert tree.find(tree.root, SAME_HASH, pack_ids(IDS), b"") is None
    assert tree.nodes() == [second]
    tree.check_integrity()


def test_a_parent_cannot_leave_before_its_children() -> None:
    tree = BlockTree(b"root")
    parent = add(tree, tree.root, IDS)
    add(tree, parent, IDS)
    parent.device_block_id = None
    with pytest.raises(AssertionError, match="before its children"):
        tree.drop_if_empty(parent)
    with pytest.raises(AssertionError, match=r"empty node|prefix-closed"):
        tree.check_integrity()


def test_the_nearest_child_agrees_longest_and_never_has_another_salt() -> None:
    tree = BlockTree(b"root")
    near = add(tree, tree.root, (*IDS[:10], *[99] * 6))
    add(tree, tree.root, (*IDS[:3], *[98] * 13))
    add(tree, tree.root, IDS, b"salt of another client")
    assert tree.nearest_child(tree.root, IDS, b"") == (near, 10)
    assert tree.nearest_child(near, IDS, b"") == (None, 0)
