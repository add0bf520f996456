"""Blocks on their way from the device to lower tiers. The batch goes on; what is being copied cannot be evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .block_pool import BlockPool
from .block_tree import BlockNode
from .tiers.tier import BlockImages, CopyingImages, ImageCopy
from .tiers.tier_manager import TierManager


@dataclass(frozen=True, slots=True)
class BlockReads:
    nodes: Sequence[BlockNode]
    """Parents before children."""
    held_block_ids: Sequence[int]
    """They and all blocks before them in their chains."""
    copy: ImageCopy


class StoreSet:
    """Where the device cannot copy by itself, images are read and offered at once."""

    def __init__(self, pool: BlockPool, tiers: TierManager, images: BlockImages | None) -> None:
        self._pool = pool
        self._tiers = tiers
        self._images = images if isinstance(images, CopyingImages) else None
        self._reads: deque[BlockReads] = deque()

    def advance(self, budget_bytes: int, is_idle: bool) -> None:
        """Offers what has come to the tiers and asks the device for more, up to about `budget_bytes`. `is_idle`: tiers
        that have refused are left alone until they report something."""
        if self._images is None:
            self._tiers.store_some(budget_bytes)
            return
        self._take_done()
        num_blocks = min(max(budget_bytes // self._images.image_bytes, 1), self._images.num_free_reads)
        self._start(self._images, self._tiers.unstored(num_blocks, set(self._nodes()), is_asking=not is_idle))

    @property
    def is_reading(self) -> bool:
        return bool(self._reads)

    def wait(self) -> None:
        """For what is being copied; it is yet to be offered."""
        for reads in self._reads:
            reads.copy.wait()

    def settle(self) -> None:
        """Waits for what is being copied and offers it."""
        self.wait()
        self._take_done()

    def abandon(self) -> None:
        """Waits for what is being copied; nobody wants it."""
        for reads in self._reads:
            with suppress(Exception):
                reads.copy.wait()
            reads.copy.release()
            self._pool.end_copy(reads.held_block_ids)
        self._reads.clear()

    def held_block_ids(self) -> Iterator[int]:
        """Each as often as it is held."""
        for reads in self._reads:
            yield from reads.held_block_ids

    def _nodes(self) -> Iterator[BlockNode]:
        for reads in self._reads:
            yield from reads.nodes

    def _start(self, images: CopyingImages, nodes: Sequence[BlockNode]) -> None:
        if not nodes:
            return
        held_block_ids = [_block_id(node) for node in _with_ancestors(nodes)]
        self._pool.begin_copy(held_block_ids)
        copy = images.start_read([_block_id(node) for node in nodes])
        self._reads.append(BlockReads(nodes, held_block_ids, copy))

    def _take_done(self) -> None:
        while self._reads and self._reads[0].copy.is_done:
            reads = self._reads.popleft()
            self._tiers.offer_images(reads.nodes, reads.copy.images)
            reads.copy.release()
            self._pool.end_copy(reads.held_block_ids)


def _with_ancestors(nodes: Sequence[BlockNode]) -> list[BlockNode]:
    """Each once, parents first."""
    found: set[BlockNode] = set()
    for node in nodes:
        above: BlockNode | None = node
        while above is not None and above.parent is not None and above not in found:
            found.add(above)
            above = above.parent
    return sorted(found, key=lambda node: node.position)


def _block_id(node: BlockNode) -> int:
    assert node.device_block_id is not None, "a block is stored from the device"
    return node.device_block_id
