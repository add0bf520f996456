"""One lower tier as the tree sees it: where its copy hangs on a node, and which blocks it still lacks."""

from __future__ import annotations

from ..block_tree import BlockNode
from .tier import LowerTier, TierCopy

NUM_UNSTORED_MIN = 64
"""Below that many, nodes that have left the device meanwhile do not matter."""


class TierSlot:
    def __init__(self, tier: LowerTier) -> None:
        if tier.name not in ("host", "disk"):
            raise ValueError(f"a lower tier is host or disk, got {tier.name!r}")
        self.tier = tier
        self.name = tier.name
        self.unstored: dict[BlockNode, None] = {}
        """Blocks of the device to be stored, in the order in which they were published."""
        self.is_refusing = False
        """It refused the last block: nothing goes before it reports a change."""
        self._num_after_pruning = NUM_UNSTORED_MIN

    def copy_of(self, node: BlockNode) -> TierCopy | None:
        return node.host_copy if self.name == "host" else node.disk_copy

    def set_copy(self, node: BlockNode, copy: TierCopy | None) -> None:
        if self.name == "host":
            node.host_copy = copy
        else:
            node.disk_copy = copy

    def offer(self, node: BlockNode) -> None:
        """It lies on the device and may be stored."""
        if self.copy_of(node) is None:
            self.unstored[node] = None

    def missing_chain(self, node: BlockNode) -> list[BlockNode]:
        """What must be stored for `node` to be stored, from the root's side; nothing if it has left the device."""
        missing: list[BlockNode] = []
        if node.device_block_id is None:
            return missing
        above: BlockNode | None = node
        while above is not None and above.parent is not None and self.copy_of(above) is None:
            missing.append(above)
            above = above.parent
        return missing[::-1]

    def prune(self) -> None:
        """While the tier refuses, what has left the device in the meantime must not pile up."""
        if len(self.unstored) > 2 * self._num_after_pruning:
            self.unstored = {node: None for node in self.unstored if node.device_block_id is not None}
            self._num_after_pruning = max(len(self.unstored), NUM_UNSTORED_MIN)
