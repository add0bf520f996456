"""Reads every record there is and finds the bad ones."""

from __future__ import annotations

from collections.abc import Callable

from ..tiers.tier import BlockRecord
from .index import BlockRow, SlabRow, StoreIndex
from .reader import RecordReader
from .record import BadRecordError
from .slab_set import SlabSet
from .status import VerifyResult
from .stored import unwrap_rows


class Verification:
    """One pass. Slabs may be in use meanwhile: what is erased or replaced while it is read is not bad."""

    def __init__(
        self,
        slabs: SlabSet,
        index: StoreIndex,
        on_progress: Callable[[int, int], None],
        is_cancelled: Callable[[], bool],
    ):
        """`on_progress`: (records read, records in all)."""
        self._slabs = slabs
        self._index = index
        self._on_progress = on_progress
        self._is_cancelled = is_cancelled
        self._num_blocks = sum(index.num_blocks(row.id) for row in index.slabs())
        self._num_checked = 0
        self._damaged: set[bytes] = set()

    def bad_slots(self, row: SlabRow) -> list[int]:
        """Slots of a slab whose record is not what its row says, or cannot be read. Raises BrokenIndexError, OSError
        when the index or the file as a whole cannot be used."""
        cipher = self._slabs.cipher
        raw_rows = self._index.block_rows(row.id)
        rows, data_keys, unreadable = unwrap_rows(raw_rows, cipher)
        hash_at: dict[int, bytes] = {raw[0]: raw[1] for raw in raw_rows}
        bad = unreadable
        memory = memoryview(bytearray(row.payload_bytes))
        with self._slabs.opened(row.fingerprint) as file:
            reader = RecordReader(file, row.fingerprint, row.payload_bytes, cipher, data_keys.get)
            for block in map(BlockRow._make, rows):
                if self._is_cancelled():
                    break
                if not _is_good(reader, block, memory) and self._index.has_row(row.id, block.slot, block.block_hash):
                    bad.append(block.slot)
                self._num_checked += 1
                self._on_progress(self._num_checked, max(self._num_blocks, self._num_checked))
        self._damaged.update(hash_at[slot] for slot in bad)
        return bad

    def result(self) -> VerifyResult:
        damaged = frozenset(self._damaged)
        return VerifyResult(self._num_checked, len(damaged), damaged, not self._is_cancelled())


def _is_good(reader: RecordReader, block: BlockRow, memory: memoryview) -> bool:
    record = BlockRecord(block.block_hash, block.parent_hash, block.position, block.packed_ids, block.extra)
    try:
        reader.read(block.slot, memory, record)
    except (BadRecordError, OSError):
        return False
    return True
