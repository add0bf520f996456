"""Reads every record there is and finds the bad ones."""

from __future__ import annotations

from collections.abc import Callable

from ..tiers.tier import BlockRecord
from .cipher import Cipher
from .files import StoreFile
from .index import BlockRow, SlabRow, StoreIndex
from .reader import RecordReader
from .record import BadRecordError
from .stored import unwrap_rows


def bad_slots(
    file: StoreFile,
    row: SlabRow,
    index: StoreIndex,
    cipher: Cipher | None,
    on_checked: Callable[[], None],
    is_cancelled: Callable[[], bool],
) -> dict[int, bytes]:
    """Slot -> block hash of the records of one slab that are not what their row says. The slab may be in use: what is
    erased or replaced meanwhile is not bad. Raises BrokenIndexError; OSError counts as bad."""
    raw_rows = index.block_rows(row.id)
    rows, data_keys, unreadable = unwrap_rows(raw_rows, cipher)
    hash_at = {raw[0]: raw[1] for raw in raw_rows}
    bad = {slot: hash_at[slot] for slot in unreadable}
    reader = RecordReader(file, row.fingerprint, row.payload_bytes, cipher, data_keys.get)
    memory = memoryview(bytearray(row.payload_bytes))
    for block in map(BlockRow._make, rows):
        if is_cancelled():
            break
        record = BlockRecord(block.block_hash, block.parent_hash, block.position, block.packed_ids, block.extra)
        if not _is_good(reader, block.slot, memory, record) and index.has_row(row.id, block.slot, block.block_hash):
            bad[block.slot] = block.block_hash
        on_checked()
    return bad


def _is_good(reader: RecordReader, slot: int, memory: memoryview, record: BlockRecord) -> bool:
    try:
        reader.read(slot, memory, record)
    except (BadRecordError, OSError):
        return False
    return True
