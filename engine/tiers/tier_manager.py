"""The tiers below the device: which copies hang on which nodes, what is yet to be stored, what was hit.

Every tier is prefix-closed, and the tree shows it: a node with a copy in a tier has a parent with a copy in that tier.
The tiers' own threads change the state of copies; their places on the nodes change here alone, on the engine's thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ..block_tree import BlockNode, BlockTree
from .pins import Pins
from .tier import BlockImages, BlockRecord, CopyState, LoadJob, LowerTier, TierCopy, TierStats
from .tier_slot import TierSlot

CLOSING_BYTES = 1 << 30
"""Offered at a time when nothing else is left to do."""


class LoadPart(NamedTuple):
    """Consecutive blocks of a chain that one tier reads."""

    job: LoadJob
    tier_name: str
    num_blocks: int


class TierManager:
    """`lower`: fastest first. `images`: the device's blocks as bytes; needed as soon as there is a lower tier."""

    def __init__(self, tree: BlockTree, lower: Sequence[LowerTier] = (), images: BlockImages | None = None) -> None:
        if lower and images is None:
            raise ValueError("lower tiers need the images of the device's blocks")
        self._tree = tree
        self._slots = [TierSlot(tier) for tier in lower]
        self._images = images
        self._pins = Pins(self._slots)
        tree.on_drop = self._pins.release
        for slot in self._slots:
            self._attach_all(slot)

    @property
    def num_unstored(self) -> int:
        """Blocks that a tier is yet to be given."""
        return sum(len(slot.unstored) for slot in self._slots)

    @property
    def can_store_more(self) -> bool:
        """Blocks wait to be stored, and their tier has not just refused one."""
        return any(slot.unstored and not slot.is_refusing for slot in self._slots)

    def poll(self) -> None:
        """Takes over what the tiers report: copies that came to be safe, copies that are gone."""
        for slot in self._slots:
            for copy in slot.tier.poll():
                slot.is_refusing = False
                if copy.state is CopyState.GONE:
                    self._lose(slot, copy)
                elif self._node_of(slot, copy) is None:
                    # It was on its way when the engine started anew.
                    parent = self._tree.root if copy.parent is None else self._node_of(slot, copy.parent)
                    self._attach(slot, copy, parent)

    def hold(self, nodes: Sequence[BlockNode], owner: str, is_transient: bool) -> None:
        """A request has come to hold these blocks of the device, parents first. What it may keep is to be stored."""
        for node in nodes:
            self._pins.hold(node, owner)
            if node.is_transient and not is_transient:
                node.is_transient = False
        if nodes and not nodes[-1].is_transient:
            for slot in self._slots:
                slot.offer(nodes[-1])

    def store_some(self, budget_bytes: int) -> None:
        """Offers blocks of the device that a tier lacks, oldest first, each with what its chain lacks before it. A tier
        that refuses is asked again next time."""
        for slot in self._slots:
            self._store_in(slot, max(budget_bytes // slot.tier.image_bytes, 1))

    def unstored(self, num_blocks: int, besides: Collection[BlockNode], is_asking: bool) -> list[BlockNode]:
        """The same blocks, for a device that gives their images later: at most `num_blocks` that some tier lacks,
        parents before children, without `besides`. Of a tier that has refused one block is tried, if `is_asking`."""
        wanted: dict[BlockNode, None] = {}
        for slot in self._slots:
            num_left = min(num_blocks, int(is_asking)) if slot.is_refusing else num_blocks
            for node in list(islice(slot.unstored, num_left + len(besides))) if num_left else ():
                chain = slot.missing_chain(node)
                if not chain:
                    del slot.unstored[node]
                new = [missing for missing in chain if missing not in besides and missing not in wanted]
                wanted.update(dict.fromkeys(new[: max(num_left, 0)]))
                num_left -= len(new)
        return list(wanted)[:num_blocks]

    def offer_images(self, nodes: Sequence[BlockNode], images: Sequence[memoryview]) -> None:
        """Images of blocks of the device for every tier that lacks them."""
        for slot in self._slots:
            for node, image in zip(nodes, images, strict=True):
                if slot.copy_of(node) is not None or not self._can_follow(slot, node):
                    continue
                slot.is_refusing = not self._store(slot, node, image)
                if slot.is_refusing:
                    slot.prune()
                    break
                slot.unstored.pop(node, None)

    def hurry(self) -> None:
        """Somebody waits for blocks that are only queued."""
        for slot in self._slots:
            slot.tier.flush(0.0)

    def touch(self, nodes: Sequence[BlockNode]) -> None:
        """Requests hit these blocks, wherever they lie."""
        for slot in self._slots:
            copies = [copy for node in nodes if (copy := slot.copy_of(node)) is not None]
            if copies:
                slot.tier.touch(copies)

    def start_load(self, nodes: Sequence[BlockNode], deadline_s: float) -> list[LoadPart]:
        """Reads a chain of blocks, each from the fastest tier that has it."""
        runs: list[tuple[TierSlot, list[TierCopy]]] = []
        for node in nodes:
            slot, copy = self._source(node)
            if runs and runs[-1][0] is slot:
                runs[-1][1].append(copy)
            else:
                runs.append((slot, [copy]))
        return [LoadPart(slot.tier.start_load(copies, deadline_s), slot.name, len(copies)) for slot, copies in runs]

    def forget(self, nodes: Iterable[BlockNode]) -> None:
        """No trace of these blocks remains in the lower tiers. With each node all nodes below it are given. Those
        without a copy on the device leave the tree."""
        deepest_first = sorted(nodes, key=lambda node: -node.position)
        for slot in self._slots:
            copies = [copy for node in deepest_first if (copy := slot.copy_of(node)) is not None]
            for node in deepest_first:
                slot.set_copy(node, None)
            if copies:
                slot.tier.remove(copies, is_forgotten=True)
        for node in deepest_first:
            self._tree.drop_if_empty(node)

    def set_pinned(self, owner: str, nodes: Sequence[BlockNode], is_pinned: bool) -> None:
        self._pins.set_pinned(owner, nodes, is_pinned)

    def pins(self) -> Mapping[str, Collection[bytes]]:
        """Pinned owners and the names of the blocks that they pin."""
        return self._pins.names()

    def stats(self) -> dict[str, TierStats]:
        """From any thread."""
        return {slot.name: slot.tier.stats() for slot in self._slots}

    def read_rate(self, tier_name: str) -> float:
        """Bytes a second; 0 while unknown."""
        return next(slot.tier.stats().read_bytes_per_s for slot in self._slots if slot.name == tier_name)

    def close(self, timeout_s: float) -> None:
        """Stores what can be stored within the time, then closes the tiers."""
        ends_s = time.monotonic() + timeout_s
        num_before = -1
        self.store_some(CLOSING_BYTES)
        while (num_unstored := self.num_unstored) and num_unstored != num_before:  # else it is refused for good
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not all(slot.tier.flush(left_s) for slot in self._slots):
                break
            num_before = num_unstored
            self.poll()
            self.store_some(CLOSING_BYTES)
        for slot in self._slots:
            slot.tier.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when copies and nodes disagree beyond what is yet to be polled."""
        for slot in self._slots:
            for node in self._tree.nodes():
                copy = slot.copy_of(node)
                assert copy is None or self._node_of(slot, copy) is node, "one copy on two nodes"
        self._pins.check_integrity(self._tree.nodes())

    def _source(self, node: BlockNode) -> tuple[TierSlot, TierCopy]:
        """The fastest tier that can give the block. A copy may be lost at any moment: then its load ends early."""
        sources = [(slot, copy) for slot in self._slots if (copy := slot.copy_of(node)) is not None]
        return next((source for source in sources if source[1].state is CopyState.STORED), sources[0])

    def _store_in(self, slot: TierSlot, num_blocks: int) -> None:
        slot.is_refusing = False
        for node in list(islice(slot.unstored, num_blocks)):
            for missing in slot.missing_chain(node):
                if num_blocks <= 0:
                    return
                if not self._store(slot, missing, self._read(missing)):
                    slot.is_refusing = True
                    slot.prune()
                    return
                num_blocks -= 1
            del slot.unstored[node]

    def _read(self, node: BlockNode) -> memoryview:
        assert self._images is not None
        assert node.device_block_id is not None, "a block is stored from the device"
        return self._images.read(node.device_block_id)

    def _can_follow(self, slot: TierSlot, node: BlockNode) -> bool:
        """What lies before it in its chain is in the tier."""
        assert node.parent is not None
        return node.parent is self._tree.root or slot.copy_of(node.parent) is not None

    def _store(self, slot: TierSlot, node: BlockNode, image: memoryview) -> bool:
        assert node.parent is not None
        assert node.device_block_id is not None, "a block is stored from the device"
        assert not node.is_transient, "a transient block would leave memory"
        record = BlockRecord(node.block_hash, node.parent.block_hash, node.position, node.packed_ids, node.extra)
        is_pinned = bool(node.pinned_by)
        copy = slot.tier.store(record, slot.copy_of(node.parent), image, lambda: node.owners, is_pinned)
        if copy is None:
            return False
        slot.set_copy(node, copy)
        self._pins.pin_further(slot, node, copy)
        return True

    def _attach_all(self, slot: TierSlot) -> None:
        """A hundred thousand blocks and more, so the garbage collector, which would walk all of them time and again,
        pauses."""
        node_of: dict[TierCopy | None, BlockNode | None] = {None: self._tree.root}
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            for copy in slot.tier.copies():
                node_of[copy] = self._attach(slot, copy, node_of.get(copy.parent))
        finally:
            if was_collecting:
                gc.enable()

    def _attach(self, slot: TierSlot, copy: TierCopy, parent: BlockNode | None) -> BlockNode | None:
        """Hangs a stored copy on its node. One that does not fit into the tree is removed: any doubt is a miss."""
        if copy.state is not CopyState.STORED:
            return None
        block_hash, parent_hash, position, packed_ids, extra = copy.record
        if parent is not None and parent.block_hash == parent_hash and parent.position + 1 == position:
            node = self._tree.find_or_add(parent, block_hash, packed_ids, extra)
            if slot.copy_of(node) is None:
                node.is_transient = False
                slot.set_copy(node, copy)
                for _ in node.pinned_by:
                    slot.tier.pin([copy], True)
                return node
        slot.tier.remove([copy], is_forgotten=False)
        return None

    def _lose(self, slot: TierSlot, copy: TierCopy) -> None:
        """The copies below it are gone too. What the device still holds is to be stored again, unless it had to make
        room: an error may have been one that passes."""
        node = self._node_of(slot, copy)
        if node is None:
            return
        lost = [node]
        for above in lost:  # grows while it is walked: parents come before their children
            lost += [child for child in above.children if slot.copy_of(child) is not None]
        for below in reversed(lost):
            slot.set_copy(below, None)
            self._tree.drop_if_empty(below)
        if not copy.is_evicted:
            for below in lost:
                if below.device_block_id is not None:
                    slot.offer(below)

    def _node_of(self, slot: TierSlot, copy: TierCopy) -> BlockNode | None:
        for node in self._tree.named(copy.record.block_hash):
            if slot.copy_of(node) is copy:
                return node
        return None
