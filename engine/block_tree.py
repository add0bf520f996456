"""The logical blocks: one node per (parent node, token ids, extra), one index over all tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

NUM_SIBLINGS_SEARCHED = 64
"""A root may have thousands of children; a miss is explained by the latest ones."""


class BlockNode:
    """One full block as a thing of its own, wherever its copies are. Immutable but for copies and children."""

    __slots__ = ("block_hash", "children", "device_block_id", "extra", "parent", "token_ids")

    def __init__(self, parent: BlockNode | None, block_hash: bytes, token_ids: tuple[int, ...], extra: bytes) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.token_ids = token_ids
        self.extra = extra
        self.children: dict[BlockNode, None] = {}
        """In order of arrival; a dict because a set has no order."""
        self.device_block_id: int | None = None

    @property
    def has_copy(self) -> bool:
        """In any tier. A node without a copy leaves the tree."""
        return self.device_block_id is not None


class BlockTree:
    """Finds nodes by chain hash, and believes a hash only when the parent is the same node and the ids are equal."""

    def __init__(self, root_hash: bytes) -> None:
        self.root = BlockNode(None, root_hash, (), b"")
        self._index: dict[bytes, tuple[BlockNode, ...]] = {}
        """Tuples are replaced, never changed: `find` may run on another thread than the engine's."""

    def find(self, parent: BlockNode, block_hash: bytes, token_ids: Sequence[int], extra: bytes) -> BlockNode | None:
        for node in self._index.get(block_hash, ()):
            if node.parent is parent and node.token_ids == tuple(token_ids) and node.extra == extra:
                return node
        return None

    def find_or_add(self, parent: BlockNode, block_hash: bytes, token_ids: Sequence[int], extra: bytes) -> BlockNode:
        """A new node has no copy yet: give it one, or `drop_if_empty` it."""
        node = self.find(parent, block_hash, token_ids, extra)
        if node is None:
            node = BlockNode(parent, block_hash, tuple(token_ids), extra)
            self._index[block_hash] = (*self._index.get(block_hash, ()), node)
            parent.children[node] = None
        return node

    def drop_if_empty(self, node: BlockNode) -> None:
        if node.has_copy:
            return
        assert node.parent is not None, "the root stays"
        assert not node.children, "a block left before its children"
        del node.parent.children[node]
        others = tuple(other for other in self._index[node.block_hash] if other is not node)
        if others:
            self._index[node.block_hash] = others
        else:
            del self._index[node.block_hash]

    def nearest_child(self, parent: BlockNode, token_ids: Sequence[int], extra: bytes) -> tuple[BlockNode | None, int]:
        """The child that agrees longest with `token_ids`, and how many ids agree. Another extra is never looked at."""
        best: BlockNode | None = None
        num_best = -1
        for node in islice(reversed(parent.children), NUM_SIBLINGS_SEARCHED):
            if node.extra == extra and (num_equal := _num_equal(node.token_ids, token_ids)) > num_best:
                best, num_best = node, num_equal
        return best, max(num_best, 0)

    def nodes(self) -> list[BlockNode]:
        return [node for bucket in self._index.values() for node in bucket]

    def check_integrity(self) -> None:
        """Raises AssertionError when the tree and its index disagree, or a tier is not prefix-closed."""
        reachable = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            reachable.append(node)
            for child in node.children:
                assert child.parent is node, "a child names another parent"
                assert child.has_copy, "an empty node stayed in the tree"
                if child.device_block_id is not None:
                    assert node is self.root or node.device_block_id is not None, "device copies: not prefix-closed"
                stack.append(child)
        indexed = self.nodes()
        assert set(indexed) == set(reachable[1:]), "index and tree hold different nodes"
        assert len(indexed) == len(reachable) - 1, "a node is in the tree twice"
        names = {(node.parent, node.token_ids, node.extra) for node in indexed}
        assert len(names) == len(indexed), "two nodes for one block"


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
