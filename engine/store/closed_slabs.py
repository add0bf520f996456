"""The slabs that no model uses now: what room they can give, and what is to be forgotten in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from .cold import ColdLeaves, ColdSlab
from .index import SlabRow, StoreIndex
from .slab_set import SlabSet
from .space import Space


class ClosedSlabs:
    """Its owner holds the lock of the space around every call. Methods raise OSError, BrokenIndexError."""

    def __init__(
        self,
        slabs: SlabSet,
        index: StoreIndex,
        space: Space,
        clock: Callable[[], float],
        is_in_use: Callable[[bytes], bool],
        pinned_in: Callable[[bytes], Collection[bytes]],
    ):
        """`is_in_use`: whether the slab of a fingerprint is left out here."""
        self._slabs = slabs
        self._index = index
        self._space = space
        self._clock = clock
        self._is_in_use = is_in_use
        self._pinned_in = pinned_in
        self._leaves: ColdLeaves | None = None

    def oldest(self, before_s: float) -> float | None:
        """As `DiskStore.oldest_elsewhere`."""
        return self._cold_leaves().oldest(before_s)

    def evict(self, num_bytes: int) -> int:
        """Erase and punch the coldest leaves; bytes freed."""
        before = self._space.used_bytes()
        emptied = {cold.slab.fingerprint for cold in self._cold_leaves().evict(num_bytes) if not cold.copies}
        if emptied:
            self.remove(lambda row: row.fingerprint in emptied)
        return max(0, before - self._space.used_bytes())

    def forget(self, fingerprint: bytes, hashes: Collection[bytes], shared: Collection[bytes]) -> tuple[int, int]:
        """As `DiskStore.forget_elsewhere`."""
        with self._opened(fingerprint) as cold:
            kept = cold.with_parents(cold.named(shared))
            named = cold.named(hashes)
            gone = cold.with_children(copy for copy in named if copy.record.block_hash not in kept) - kept
            cold.erase(gone, is_forgotten=True)
            return len(gone), sum(copy.record.block_hash in kept for copy in named)

    def punch_free(self) -> None:
        """What evicted blocks have left in free slots."""
        self.release()
        for row in self._index.slabs():
            if not self._is_in_use(row.fingerprint):
                slab = self._slabs.open(row.fingerprint)
                try:
                    slab.punch_free()
                finally:
                    slab.close()

    def discard(self, fingerprint: bytes, slots: Collection[int]) -> None:
        """Their records are bad: they go, and the blocks below them."""
        with self._opened(fingerprint) as cold:
            cold.erase(cold.with_children(cold.at(slots)), is_forgotten=False)

    def remove(self, is_unwanted: Callable[[SlabRow], bool]) -> list[int]:
        """Whole slabs; how many blocks each had."""
        self.release()
        num_blocks = []
        for row in self._index.slabs():
            if not self._is_in_use(row.fingerprint) and is_unwanted(row):
                num_blocks.append(self._index.num_blocks(row.id))
                self._slabs.remove(row)
        return num_blocks

    def release(self) -> None:
        """Close what is open here: somebody else is about to use a slab."""
        if self._leaves is not None:
            self._leaves.close()
            self._leaves = None

    def _cold_leaves(self) -> ColdLeaves:
        """Kept until `release`: finding them reads all rows."""
        if self._leaves is None:
            rows = self._index.slabs()
            in_use = {row.content_sha256 for row in rows if self._is_in_use(row.fingerprint)}
            with contextlib.ExitStack() as undo:
                cold = []
                for row in rows:
                    if not self._is_in_use(row.fingerprint):
                        slab = self._slabs.open(row.fingerprint)
                        undo.callback(slab.close)
                        cold.append(ColdSlab(slab, is_stale=row.content_sha256 in in_use))
                undo.pop_all()
            self._leaves = ColdLeaves(cold, self._pinned_in, self._clock())
        return self._leaves

    @contextlib.contextmanager
    def _opened(self, fingerprint: bytes) -> Iterator[ColdSlab]:
        self.release()
        slab = self._slabs.open(fingerprint)
        try:
            yield ColdSlab(slab)
        finally:
            slab.close()
