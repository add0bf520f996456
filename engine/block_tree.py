"""The logical blocks: one node per (parent node, token ids, extra), one index over all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from .block_hash import unpack_ids
from .tiers.tier import CopyState, TierCopy

NUM_SIBLINGS_SEARCHED = 64
"""A root may have thousands of children; a miss is explained by the latest ones."""
NOBODY: frozenset[str] = frozenset()


class BlockNode:
    """One full block as a thing of its own, wherever its copies are. What it is never changes; where it lies and whom
    it belongs to does."""

    __slots__ = (
        "block_hash",
        "children",
        "device_block_id",
        "disk_copy",
        "extra",
        "host_copy",
        "is_transient",
        "owners",
        "packed_ids",
        "parent",
        "pinned_by",
        "position",
    )

    def __init__(self, parent: BlockNode | None, block_hash: bytes, packed_ids: bytes, extra: bytes) -> None:
        self.parent = parent
        self.position: int = parent.position + 1 if parent is not None else -1
        """Index in its chain."""
        self.block_hash = block_hash
        self.packed_ids = packed_ids
        """Token ids, u32 little endian."""
        self.extra = extra
        self.children: dict[BlockNode, None] = {}
        """In order of arrival; a dict because a set has no order."""
        self.device_block_id: int | None = None
        self.host_copy: TierCopy | None = None
        self.disk_copy: TierCopy | None = None
        self.is_transient = False
        """No request has held it that may leave memory."""
        self.owners = NOBODY
        """Chats that have held it since the engine started."""
        self.pinned_by = NOBODY

    @property
    def token_ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed_ids)

    @property
    def has_copy(self) -> bool:
        """In any tier. A node without a copy leaves the tree."""
        return self.device_block_id is not None or self.host_copy is not None or self.disk_copy is not None

    @property
    def place(self) -> str | None:
        """The fastest tier that can give its content now; a copy that is only queued cannot."""
        return "device" if self.device_block_id is not None else self.lower_place

    @property
    def lower_place(self) -> str | None:
        """The same without the device."""
        if self.host_copy is not None and self.host_copy.state is CopyState.STORED:
            return "host"
        if self.disk_copy is not None and self.disk_copy.state is CopyState.STORED:
            return "disk"
        return None


class BlockTree:
    """Finds nodes by chain hash, and believes a hash only when the parent is the same node and the ids are equal."""

    def __init__(self, root_hash: bytes) -> None:
        self.root = BlockNode(None, root_hash, b"", b"")
        self._index: dict[bytes, tuple[BlockNode, ...]] = {}
        """Tuples are replaced, never changed: `find` may run on another thread than the engine's."""
        self.on_drop: Callable[[BlockNode], None] = lambda node: None
        """Is told each node that leaves the tree."""

    def find(self, parent: BlockNode, block_hash: bytes, packed_ids: bytes, extra: bytes) -> BlockNode | None:
        for node in self._index.get(block_hash, ()):
            if node.parent is parent and node.packed_ids == packed_ids and node.extra == extra:
                return node
        return None

    def find_or_add(self, parent: BlockNode, block_hash: bytes, packed_ids: bytes, extra: bytes) -> BlockNode:
        """A new node has no copy yet: give it one, or `drop_if_empty` it."""
        bucket = self._index.get(block_hash, ())
        node = self.find(parent, block_hash, packed_ids, extra) if bucket else None
        if node is None:
            node = BlockNode(parent, block_hash, packed_ids, extra)
            self._index[block_hash] = (*bucket, node)
            parent.children[node] = None
        return node

    def named(self, block_hash: bytes) -> tuple[BlockNode, ...]:
        """All nodes of that name: one, but for collisions."""
        return self._index.get(block_hash, ())

    def chain(self, block_hashes: Sequence[bytes]) -> Iterator[BlockNode]:
        """The nodes of these names, each the child of the one before, up to the first that is not there."""
        node = self.root
        for block_hash in block_hashes:
            for child in self.named(block_hash):
                if child.parent is node:
                    node = child
                    break
            else:
                return
            yield node

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
        self.on_drop(node)

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
                self._check_child(node, child)
                stack.append(child)
        indexed = self.nodes()
        assert set(indexed) == set(reachable[1:]), "index and tree hold different nodes"
        assert len(indexed) == len(reachable) - 1, "a node is in the tree twice"
        names = {(node.parent, node.packed_ids, node.extra) for node in indexed}
        assert len(names) == len(indexed), "two nodes for one block"

    def _check_child(self, node: BlockNode, child: BlockNode) -> None:
        assert child.parent is node, "a child names another parent"
        assert child.position == node.position + 1
        assert child.has_copy, "an empty node stayed in the tree"
        is_first = node is self.root
        if child.device_block_id is not None:
            assert is_first or node.device_block_id is not None, "device copies: not prefix-closed"
        for copy, parent_copy in ((child.host_copy, node.host_copy), (child.disk_copy, node.disk_copy)):
            if copy is None:
                continue
            assert is_first or parent_copy is not None, "lower copies: not prefix-closed"
            assert copy.parent is parent_copy, "a copy hangs on another copy than its node's parent's"
            record = copy.record
            assert (record.block_hash, record.packed_ids, record.extra) == (
                child.block_hash,
                child.packed_ids,
                child.extra,
            ), "a copy of something else"
            assert (record.parent_hash, record.position) == (node.block_hash, child.position)
            assert not child.is_transient, "a transient block has left memory"
        assert child.is_transient or is_first or not node.is_transient, "a lasting block hangs on a transient one"


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
