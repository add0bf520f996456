"""Blocks that must leave: a deleted chat's from everywhere, an idle chat's from the device alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .block_tree import BlockNode
from .kv_cache import KVCacheManager
from .tiers.tier import BlockImages
from .tiers.tier_manager import TierManager


class ForgetResult(NamedTuple):
    num_removed: int
    """Blocks that are gone from every tier."""
    num_shared: int
    """Blocks that stay, because others hold them too."""


class Forgetting:
    """One removal. `held`: blocks that requests hold or load now; they stay where they are. `images` wipes what is
    removed from the device."""

    def __init__(
        self, kv: KVCacheManager, tiers: TierManager, images: BlockImages | None, held: Collection[BlockNode]
    ) -> None:
        self._kv = kv
        self._tiers = tiers
        self._images = images
        self._held = held

    def forget(self, nodes: Iterable[BlockNode], owner: str | None, shared: Collection[bytes]) -> ForgetResult:
        """Removes the nodes and all below them, but for what others own or hold, and what lies before that. Below a
        node that stays, only nodes that were named go. No owner: whoever owns them."""
        shared = frozenset(shared)
        own = set(nodes)
        protected = {node for node in own if self._is_protected(node, owner, shared)}
        staying = set(protected)
        removed = []
        for node in sorted(self._with_descendants(own - protected), key=lambda node: -node.position):
            if self._is_protected(node, owner, shared) or any(child in staying for child in node.children):
                staying.add(node)
            else:
                removed.append(node)
        for node in staying & own:
            node.owners -= {owner}
        self._tiers.forget(removed)
        for node in removed:
            if node.device_block_id is not None:
                self._kv.pool.drop(node)
        self._wipe()
        return ForgetResult(len(removed), len(staying & own))

    def offload(self, nodes: Iterable[BlockNode]) -> int:
        """Gives up device copies, last ones first, where a lower tier has a safe one and no child is left behind."""
        num_dropped = 0
        for node in sorted(set(nodes), key=lambda node: -node.position):
            if node.device_block_id is None or not self._kv.pool.is_free(node.device_block_id):
                continue
            is_parent = any(child.device_block_id is not None for child in node.children)
            if not is_parent and node.lower_place is not None:
                self._kv.pool.drop(node)
                num_dropped += 1
        return num_dropped

    def _is_protected(self, node: BlockNode, owner: str | None, shared: Collection[bytes]) -> bool:
        is_owned = owner is not None and bool(node.owners - {owner})
        return is_owned or node in self._held or node.block_hash in shared

    @staticmethod
    def _with_descendants(nodes: Iterable[BlockNode]) -> set[BlockNode]:
        found: set[BlockNode] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.children
        return found

    def _wipe(self) -> None:
        """Blank blocks that were written before, whoever wrote them."""
        stale = self._kv.pool.take_stale()
        if self._images is None:
            return
        zeros = memoryview(bytes(self._images.image_bytes))
        for block_id in stale:
            self._images.write(block_id, zeros)
