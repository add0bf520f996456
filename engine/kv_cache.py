"""Which blocks hold which sequence's keys and values: longest hit, allocation, publishing, forks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .block_hash import BLOCK_ID_BYTES, BlockHasher, pack_ids, salt_extra
from .block_pool import BlockPool
from .block_tree import BlockNode, BlockTree
from .config import BLOCK_SIZE
from .request import Miss
from .sequence import HitMemo, SequenceState
from .tiers.tier_manager import TierManager


class Hit(NamedTuple):
    """The longest chain that all tiers together hold of a sequence, beyond what it holds itself."""

    device: list[BlockNode]
    lower: list[BlockNode]
    """They follow those of the device: every tier holds whole chains from the root."""
    is_queued: bool = False
    """The block after them is about to be safe in a lower tier."""

    @property
    def nodes(self) -> list[BlockNode]:
        return self.device + self.lower


class KVCacheManager:
    """Moves blocks between sequences, the free queue and the tree. Every call either does all of it or nothing."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        tree: BlockTree,
        tiers: TierManager,
        poison: Callable[[int], None] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.tree = tree
        self.pool = BlockPool(num_blocks, tree, poison, clock)
        self._tiers = tiers
        self._hasher = hasher

    def longest_hit(self, sequence: SequenceState) -> Hit:
        """Cached blocks that continue the sequence's chain beyond `sequence.nodes`, first to last."""
        device = self.device_hit(sequence)
        lower: list[BlockNode] = []
        node = device[-1] if device else self._tip(sequence)
        for index in range(len(sequence.nodes) + len(device), sequence.num_full_blocks):
            child = self._child(sequence, index, node)
            if child is None:
                break
            if child.lower_place is None:
                return Hit(device, lower, is_queued=True)
            lower.append(child)
            node = child
        return Hit(device, lower)

    def device_hit(self, sequence: SequenceState) -> list[BlockNode]:
        """Those of them that lie on the device. Who waits asks before every step: what was found before is still there
        unless a block has left the device since, and only what may follow it is looked for."""
        memo = sequence.hit_memo
        if sequence.nodes or memo is None or memo.num_evictions != self.pool.num_evictions:
            memo = HitMemo(self.pool.num_evictions)
            sequence.hit_memo = None if sequence.nodes else memo
        device = memo.nodes
        node = device[-1] if device else self._tip(sequence)
        for index in range(len(sequence.nodes) + len(device), sequence.num_full_blocks):
            child = self._child(sequence, index, node)
            if child is None or child.device_block_id is None:
                break
            device.append(child)
            node = child
        return device

    def _child(self, sequence: SequenceState, index: int, parent: BlockNode) -> BlockNode | None:
        """The node of the sequence's block `index`."""
        block_hash, packed_ids = self.block_hash(sequence, index), sequence.packed_block(index)
        return self.tree.find(parent, block_hash, packed_ids, self._extra(sequence, index))

    def num_blocks_needed(self, sequence: SequenceState, hits: Sequence[BlockNode]) -> int:
        """Free blocks that holding all tokens of the sequence would take: new ones, and hits that are free now."""
        return sequence.num_blocks_ahead - len(hits) + self.num_free_hits(hits)

    def num_free_hits(self, hits: Sequence[BlockNode]) -> int:
        """Device hits that nobody holds now."""
        return sum(self.pool.is_free(_device_block_id(node)) for node in hits)

    def take_hits(self, sequence: SequenceState, hits: Sequence[BlockNode]) -> None:
        """The sequence holds the device blocks `hits` and skips their tokens, but for the last one: at least one token
        is computed."""
        assert len(sequence.block_table) == len(sequence.nodes), "hits follow full blocks only"
        block_ids = [_device_block_id(node) for node in hits]
        self.pool.touch(block_ids)
        sequence.block_table += block_ids
        sequence.nodes += hits
        sequence.hit_memo = None
        self._skip_held_tokens(sequence)
        self._tiers.hold(hits, sequence.request.owner, sequence.request.is_transient)

    def allocate(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` tokens and not one more. False, and nothing changed, if too few are free."""
        num_new = self.num_new_blocks(sequence, num_tokens)
        if num_new > self.pool.num_free:
            return False
        if num_new > 0:
            sequence.block_table += self.pool.allocate(num_new)
        return True

    def num_new_blocks(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that the next `num_tokens` tokens take."""
        num_blocks = -(-(sequence.num_launched_tokens + num_tokens) // BLOCK_SIZE)
        return max(num_blocks - len(sequence.block_table), 0)

    def place_loaded(self, sequence: SequenceState, block_id: int) -> None:
        """The reserved block holds the image of the sequence's next block, verified."""
        assert len(sequence.block_table) == len(sequence.nodes), "a load follows full blocks only"
        sequence.block_table.append(block_id)
        self._publish_block(sequence, len(sequence.nodes))
        self._skip_held_tokens(sequence)

    def publish(self, sequence: SequenceState) -> None:
        """Blocks that have become full get their name. If another sequence published the same block before, the
        sequence holds that one from now on and its own is free."""
        for index in range(len(sequence.nodes), sequence.num_computed_tokens // BLOCK_SIZE):
            self._publish_block(sequence, index)

    def _publish_block(self, sequence: SequenceState, index: int) -> None:
        block_id = sequence.block_table[index]
        node = self.tree.find_or_add(
            self._tip(sequence),
            self.block_hash(sequence, index),
            sequence.packed_block(index),
            self._extra(sequence, index),
        )
        if not node.has_copy:
            node.is_transient = True  # until `hold` says otherwise
        if node.device_block_id is None:
            self.pool.cache_full_block(block_id, node)
        else:
            self.pool.touch([node.device_block_id])
            sequence.block_table[index] = node.device_block_id
            self.pool.free([block_id])
        sequence.nodes.append(node)
        self._tiers.hold([node], sequence.request.owner, sequence.request.is_transient)

    def _skip_held_tokens(self, sequence: SequenceState) -> None:
        num_held_tokens = len(sequence.nodes) * BLOCK_SIZE
        num_skipped = min(num_held_tokens, sequence.num_skippable_tokens)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_skipped)

    def fork(self, parent: SequenceState, child: SequenceState) -> bool:
        """The child shares the parent's full blocks and gets a copy of its tail. False, and nothing changed, if the
        tail needs a block and none is free."""
        num_tail_tokens = parent.num_computed_tokens - len(parent.nodes) * BLOCK_SIZE
        if num_tail_tokens > 0 and self.pool.num_free == 0:
            return False
        child.nodes = list(parent.nodes)
        child.block_table = parent.block_table[: len(parent.nodes)]
        self.pool.touch(child.block_table)
        if num_tail_tokens > 0:
            source = parent.block_table[len(parent.nodes)]
            (destination,) = self.pool.allocate(1)
            self.pool.touch([source])
            child.pending_copy = (source, destination)
            child.block_table.append(destination)
        child.num_computed_tokens = parent.num_computed_tokens
        return True

    def finish_copy(self, sequence: SequenceState) -> None:
        """The tail was copied, or a launched step copies it, or it never will be: its source is let go."""
        if sequence.pending_copy is not None:
            self.pool.free([sequence.pending_copy[0]])
            sequence.pending_copy = None

    def free(self, sequence: SequenceState) -> None:
        """All blocks go back. Full ones stay cached until they are reused; an unpublished one is blank at once."""
        self.finish_copy(sequence)
        self.pool.free(sequence.block_table, is_used=sequence.warm is None)
        sequence.block_table = []
        sequence.nodes = []
        sequence.num_computed_tokens = sequence.num_flying_tokens = sequence.num_flying_samples = 0

    def slot_mapping(self, sequence: SequenceState, start: int, stop: int, no_slot: int) -> list[int]:
        """block_id * BLOCK_SIZE + offset per position; `no_slot` inside full blocks, which are shared."""
        first_writable = len(sequence.nodes) * BLOCK_SIZE
        table = sequence.block_table
        return [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            if position >= first_writable
            else no_slot
            for position in range(start, stop)
        ]

    def explain_miss(self, sequence: SequenceState, hits: Sequence[BlockNode]) -> Miss | None:
        """Where the prompt leaves what is cached, and what the nearest cached block holds there. None: all its full
        blocks are hits."""
        prompt = sequence.request.prompt_token_ids
        num_blocks = len(sequence.nodes) + len(hits)
        start = num_blocks * BLOCK_SIZE
        block_ids = prompt[start : start + BLOCK_SIZE]
        if len(block_ids) < BLOCK_SIZE:
            return None
        parent = hits[-1] if hits else self._tip(sequence)
        sibling, num_equal = self.tree.nearest_child(parent, block_ids, self._extra(sequence, num_blocks))
        expected = sibling.token_ids[num_equal:] if sibling is not None else ()
        return Miss(start + num_equal, tuple(expected), tuple(block_ids[num_equal:]))

    def find_chain(self, token_ids: Sequence[int], cache_salt: bytes) -> list[BlockNode]:
        """Nodes of a prompt's full blocks that any tier holds, first to last. Touches nothing; any thread may ask."""
        packed_ids = pack_ids(token_ids)
        extra = salt_extra(cache_salt)
        nodes: list[BlockNode] = []
        node: BlockNode | None = self.tree.root
        for index, block_hash in enumerate(self._hasher.chain(packed_ids, extra)):
            assert node is not None
            start = index * BLOCK_ID_BYTES
            packed_block = packed_ids[start : start + BLOCK_ID_BYTES]
            node = self.tree.find(node, block_hash, packed_block, extra if index == 0 else b"")
            if node is None:
                break
            nodes.append(node)
        return nodes

    def block_hash(self, sequence: SequenceState, index: int) -> bytes:
        """Chain hash of the sequence's full block `index`; computed once."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            parent_hash = hashes[-1] if hashes else self._hasher.root_hash
            place = len(hashes)
            hashes.append(
                self._hasher.packed_hash(parent_hash, sequence.packed_block(place), self._extra(sequence, place))
            )
        return hashes[index]

    def check_integrity(self, sequences: Iterable[SequenceState], reserved: Iterable[int] = ()) -> None:
        """Recomputes every invariant of pool, tree and tables. `sequences`: all that may hold blocks; `reserved`:
        blocks that loads and stores hold."""
        num_holders: Counter[int] = Counter(reserved)
        num_holders.update(self.pool.deferred_block_ids())
        for sequence in sequences:
            self._check_sequence(sequence)
            num_holders.update(sequence.block_table)
            if sequence.pending_copy is not None:
                num_holders[sequence.pending_copy[0]] += 1
        self.pool.check_integrity(num_holders)
        self.tree.check_integrity()
        for node in self.tree.nodes():
            assert node.parent is not None
            expected = self._hasher.packed_hash(node.parent.block_hash, node.packed_ids, node.extra)
            assert node.block_hash == expected, "a node's name is not that of its content"

    def _check_sequence(self, sequence: SequenceState) -> None:
        table, nodes, num_computed = sequence.block_table, sequence.nodes, sequence.num_computed_tokens
        assert len(table) <= -(-sequence.num_drawn_tokens // BLOCK_SIZE), "more blocks than ceil(tokens / block size)"
        assert len(set(table)) == len(table), "a block is in the table twice"
        assert num_computed <= sequence.num_skippable_tokens or not table, "nothing is left to compute"
        is_behind = sequence.num_launched_tokens < sequence.num_drawn_tokens + (sequence.warm is not None)
        assert is_behind or not table, "a token is computed that nobody has drawn"
        num_held_tokens = max(num_computed, len(nodes) * BLOCK_SIZE)
        num_taken_tokens = max(sequence.num_launched_tokens, num_held_tokens)
        assert len(table) == -(-num_taken_tokens // BLOCK_SIZE), "a block is reserved ahead"
        assert len(nodes) == num_held_tokens // BLOCK_SIZE, "a full block is not published, or a part of one is"
        parent = self.tree.root
        for index, node in enumerate(nodes):
            assert node.device_block_id == table[index], "a table names another block than its node"
            assert node.parent is parent, "a hit on another chain"
            assert node.packed_ids == sequence.packed_block(index), "a hit on other tokens"
            assert sequence.request.is_transient or not node.is_transient, "a lasting request holds a transient block"
            parent = node
        for block_id in table[len(nodes) :]:
            block = self.pool.blocks[block_id]
            assert block.node is None, "a partly filled block has a name"
        memo = sequence.hit_memo
        if memo is not None and memo.num_evictions == self.pool.num_evictions:
            assert not nodes, "who holds blocks remembers no hit"
            for index, node in enumerate(memo.nodes):
                parent = memo.nodes[index - 1] if index else self.tree.root
                assert self._child(sequence, index, parent) is node, "a remembered hit is none"
                assert node.device_block_id is not None, "a remembered hit has left the device"

    def _tip(self, sequence: SequenceState) -> BlockNode:
        return sequence.nodes[-1] if sequence.nodes else self.tree.root

    @staticmethod
    def _extra(sequence: SequenceState, index: int) -> bytes:
        return salt_extra(sequence.request.cache_salt) if index == 0 else b""


def _device_block_id(node: BlockNode) -> int:
    assert node.device_block_id is not None, "a hit has a device copy"
    return node.device_block_id
