"""Which chats hold which blocks in memory, and which of them are pinned: pinned blocks are not evicted from a tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from sys import intern

from ..block_tree import NOBODY, BlockNode
from .tier import TierCopy
from .tier_slot import TierSlot

NUM_SETS_KEPT = 64


class Pins:
    """A copy counts the pinned owners of its node."""

    def __init__(self, slots: Sequence[TierSlot]) -> None:
        self._slots = slots
        self._pinned: dict[str, dict[BlockNode, None]] = {}
        self._owner_sets: dict[frozenset[str], frozenset[str]] = {}
        """The latest ones. Most blocks of a chat have the same owners: one set for all of them."""

    def hold(self, node: BlockNode, owner: str) -> None:
        if owner and owner not in node.owners:
            owners = node.owners | {intern(owner)}
            if len(self._owner_sets) == NUM_SETS_KEPT:  # a head that many chats share has had a set for each of them
                self._owner_sets.clear()
            node.owners = self._owner_sets.setdefault(owners, owners)
            if owner in self._pinned:
                self._pin(owner, node)

    def set_pinned(self, owner: str, nodes: Iterable[BlockNode], is_pinned: bool) -> None:
        """`nodes`: those of the owner that memory may not know of. Unpinning lets all of them go."""
        if is_pinned:
            self._pinned.setdefault(intern(owner), {})
            for node in nodes:
                self._pin(owner, node)
            return
        for node in self._pinned.pop(owner, {}):
            node.pinned_by -= {owner}
            self._tell(node, is_pinned=False)

    def pin_further(self, slot: TierSlot, node: BlockNode, copy: TierCopy) -> None:
        """A new copy was stored as pinned once, if at all; the other pins are added."""
        for _ in range(len(node.pinned_by) - 1):
            slot.tier.pin([copy], True)

    def release(self, node: BlockNode) -> None:
        """The node leaves the tree."""
        for owner in node.pinned_by:
            del self._pinned[owner][node]
        node.pinned_by = NOBODY

    def names(self) -> Mapping[str, Collection[bytes]]:
        return {owner: [node.block_hash for node in nodes] for owner, nodes in self._pinned.items()}

    def check_integrity(self, nodes: Iterable[BlockNode]) -> None:
        in_tree = set(nodes)
        for owner, pinned in self._pinned.items():
            for node in pinned:
                assert owner in node.pinned_by
                assert node in in_tree, "a pinned node has left the tree"
        for node in in_tree:
            assert all(node in self._pinned[owner] for owner in node.pinned_by)
            assert all(owner in node.pinned_by for owner in node.owners if owner in self._pinned)

    def _pin(self, owner: str, node: BlockNode) -> None:
        if owner in node.pinned_by:
            return
        node.pinned_by |= {owner}
        self._pinned[owner][node] = None
        self._tell(node, is_pinned=True)

    def _tell(self, node: BlockNode, is_pinned: bool) -> None:
        for slot in self._slots:
            copy = slot.copy_of(node)
            if copy is not None:
                slot.tier.pin([copy], is_pinned)
