"""The device blocks: who holds them, which are free, which still hold something worth keeping.

A free block keeps its content and its node until it is reused. The free queue is also the eviction order:

    reused next ->  [ blank blocks | tails of old chats ... their heads | tails of recent chats ... shared heads ]

Sequences give their blocks back tail first, and whoever holds a block holds all blocks before it. So a block always
sits behind its children in the queue: eviction takes leaves only, and no cached block ever becomes unreachable.

A device works behind the engine's back. A launched step may touch every block that is held when it is launched, so what
is given back before it is over is only noted and goes into the queue after it, in the same order. What a copy reads is
held by the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from .block_tree import BlockNode, BlockTree

NEVER = float("-inf")


class Block:
    """One block of the pool. `previous` and `next` are set while it is in the free queue."""

    __slots__ = ("block_id", "next", "node", "previous", "ref_cnt", "used_s")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.node: BlockNode | None = None
        self.used_s = NEVER
        """When a sequence that answers somebody last gave it back."""
        self.previous: Block | None = None
        self.next: Block | None = None


class FreeBlockQueue:
    """A doubly linked list: every operation is O(1), also taking a block out of the middle."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.previous = self._tail, self._head
        self._num_blocks = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Reused last."""
        assert self._tail.previous is not None
        self._link(self._tail.previous, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Reused first."""
        assert self._head.next is not None
        self._link(self._head, block, self._head.next)

    def pop(self) -> Block:
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        previous, following = block.previous, block.next
        assert previous, f"block {block.block_id} is not in the free queue"
        assert following, f"block {block.block_id} is not in the free queue"
        previous.next, following.previous = following, previous
        block.previous = block.next = None
        self._num_blocks -= 1

    def _link(self, previous: Block, block: Block, following: Block) -> None:
        assert block.next is None, f"block {block.block_id} is in the free queue already"
        block.previous, block.next = previous, following
        previous.next = following.previous = block
        self._num_blocks += 1


class BlockPool:
    """`num_blocks` blocks. `poison` (debugging) is told each block id whose content has just become meaningless.
    `clock`: seconds."""

    def __init__(
        self,
        num_blocks: int,
        tree: BlockTree,
        poison: Callable[[int], None] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._tree = tree
        self._poison = poison
        self._clock = clock
        self._stale: set[int] = set()
        """Blank blocks that were written before: what they hold means nothing, but it is there."""
        self._free_queue = FreeBlockQueue(self.blocks)
        self._num_cached_free = 0
        self._deferred: deque[list[tuple[Sequence[int], bool]]] = deque()
        """For each launched step, oldest first: what was given back while it was the last one."""
        self._num_copied = 0
        self.num_evictions = 0
        """Counts up with every named block that leaves the device."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; cached ones are among them."""
        return len(self._free_queue)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached_free(self) -> int:
        """Free blocks that still hold something worth keeping."""
        return self._num_cached_free

    @property
    def is_settled(self) -> bool:
        """No step and no copy keeps a block from the free queue: waiting brings no more of them."""
        return not self._deferred and not self._num_copied

    @property
    def num_launched_steps(self) -> int:
        return len(self._deferred)

    def is_free(self, block_id: int) -> bool:
        return self.blocks[block_id].ref_cnt == 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Blank blocks with one holder each; cached ones are evicted in queue order. The caller checked num_free."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        taken = [self._free_queue.pop() for _ in range(num_blocks)]
        for block in taken:
            self._evict(block)
            block.ref_cnt = 1
            self._stale.discard(block.block_id)
        return [block.block_id for block in taken]

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more holder each; a free block leaves the queue."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt == 0:
                self._free_queue.remove(block)
                self._num_cached_free -= block.node is not None
            block.ref_cnt += 1

    def free(self, block_ids: Sequence[int], is_used: bool = True) -> None:
        """One holder fewer each, last block first, so that the tail is evicted first and the shared head last.
        `is_used`: they served somebody, and work in advance must not evict them for a while."""
        if self._deferred:
            self._deferred[-1].append((list(block_ids), is_used))
            return
        now_s = self._clock() if is_used else NEVER
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_cnt > 0, f"block {block_id} is freed twice"
            block.ref_cnt -= 1
            block.used_s = max(block.used_s, now_s)
            if block.ref_cnt == 0:
                if block.node is None:
                    self._make_blank(block)
                else:
                    self._free_queue.append(block)
                    self._num_cached_free += 1

    def begin_step(self) -> None:
        """A step is launched."""
        self._deferred.append([])

    def end_step(self) -> None:
        """The oldest launched step is known to be over."""
        deferred = self._deferred.popleft()
        later, self._deferred = self._deferred, deque()  # those were launched after all of this was given back
        for block_ids, is_used in deferred:
            self.free(block_ids, is_used)
        self._deferred = later

    def begin_copy(self, block_ids: Sequence[int]) -> None:
        """A copy reads some of these blocks: whole chains, parents first, so that the queue keeps its order."""
        self.touch(block_ids)
        self._num_copied += len(block_ids)

    def end_copy(self, block_ids: Sequence[int]) -> None:
        self._num_copied -= len(block_ids)
        self.free(block_ids, is_used=False)

    def deferred_block_ids(self) -> Iterator[int]:
        """Each as often as it was given back."""
        for given_back in self._deferred:
            for block_ids, _ in given_back:
                yield from block_ids

    def cache_full_block(self, block_id: int, node: BlockNode) -> None:
        """The block's content is final: from now on it is `node`'s device copy."""
        block = self.blocks[block_id]
        assert block.ref_cnt > 0, "nobody holds the block"
        assert block.node is None, "the block has another name"
        assert node.device_block_id is None, "the node has another block"
        block.node, node.device_block_id = node, block_id

    def drop(self, node: BlockNode) -> None:
        """The node's device copy, which nobody holds, is given up at once; its block is blank. Children go first."""
        assert node.device_block_id is not None, "the node has no device copy"
        block = self.blocks[node.device_block_id]
        assert block.ref_cnt == 0, "a sequence holds the block"
        self._free_queue.remove(block)
        self._evict(block)
        self._make_blank(block)

    def num_evictable(self, num_wanted: int, kept: Collection[BlockNode], used_before_s: float) -> int:
        """How many of `num_wanted` blocks could be had without evicting one that somebody used since `used_before_s`,
        or one of `kept`."""
        kept_nodes = set(kept)
        num_found = 0
        for block in self._free_queue:
            if block.node is not None and block.node in kept_nodes:
                continue
            if num_found == num_wanted or (block.node is not None and block.used_s > used_before_s):
                break
            num_found += 1
        return num_found

    def take_stale(self) -> list[int]:
        """Blank blocks that still hold old bytes; the caller wipes them."""
        stale = sorted(self._stale)
        self._stale.clear()
        return stale

    def _make_blank(self, block: Block) -> None:
        """Reused before anything that is cached."""
        block.used_s = NEVER
        self._stale.add(block.block_id)
        self._forget_content(block)
        self._free_queue.prepend(block)

    def _evict(self, block: Block) -> None:
        node = block.node
        if node is None:
            return
        assert all(child.device_block_id is None for child in node.children), "a block is evicted before its children"
        block.node, node.device_block_id = None, None
        block.used_s = NEVER
        self._num_cached_free -= 1
        self.num_evictions += 1
        self._tree.drop_if_empty(node)
        self._forget_content(block)

    def _forget_content(self, block: Block) -> None:
        if self._poison is not None:
            self._poison(block.block_id)

    def check_integrity(self, num_holders: Mapping[int, int]) -> None:
        """`num_holders`: block id to holders, counted anew. Raises AssertionError when anything disagrees."""
        queue = list(self._free_queue)
        place = {block.block_id: index for index, block in enumerate(queue)}
        assert len(place) == len(queue) == self.num_free, "the free queue lost count or holds a block twice"
        num_cached_free = 0
        for block in self.blocks:
            expected = num_holders.get(block.block_id, 0)
            assert block.ref_cnt == expected, f"block {block.block_id}: ref_cnt {block.ref_cnt}, {expected} holders"
            assert (block.block_id in place) == (expected == 0), f"block {block.block_id}: held and free, or neither"
            if block.node is None:
                continue
            num_cached_free += expected == 0
            assert block.node.device_block_id == block.block_id, f"block {block.block_id} and its node disagree"
            parent_id = block.node.parent.device_block_id if block.node.parent is not None else None
            if parent_id is not None and parent_id in place:
                assert place.get(block.block_id, len(queue)) < place[parent_id], "a parent would be evicted first"
        assert num_cached_free == self._num_cached_free, "num_cached_free lost count"
