"""Index rows made again from the records."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .files import StoreFile
from .index import BlockRow, SlabRow, StoreIndex
from .record import HEADER_BYTES, BadRecordError, Header, parse_header
from .slab_header import SLAB_HEADER_BYTES

_NUM_THREADS = 8
_BATCH = 1024
Progress = Callable[[int, int], None]
"""(slots read, slots in all)"""


def rebuild_rows(
    file: StoreFile, row: SlabRow, index: StoreIndex, now_s: float, counter: int, on_progress: Progress | None
) -> int:
    """A row for each record whose header is whole; how many. Doubles and blocks without a parent have one too: who
    opens the slab next erases those. Records that are encrypted have lost their key with the index: they get none.

    Raises OSError, BrokenIndexError."""
    slot_bytes = HEADER_BYTES + row.payload_bytes
    num_slots = max(0, (file.size - SLAB_HEADER_BYTES) // slot_bytes)

    def header_of(slot: int) -> Header | None:
        page = bytearray(HEADER_BYTES)
        file.pread_into([page], SLAB_HEADER_BYTES + slot * slot_bytes)
        try:
            header = parse_header(page)
        except BadRecordError:
            return None
        is_ours = header.fingerprint == row.fingerprint and header.payload_bytes == row.payload_bytes
        return header if is_ours and header.seal is None else None

    rows: list[BlockRow] = []
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chatkv-rebuild") as threads:
        for first in range(0, num_slots, _BATCH):
            slots = range(first, min(first + _BATCH, num_slots))
            for slot, header in zip(slots, threads.map(header_of, slots), strict=True):
                if header is not None:
                    rows.append(BlockRow(slot, *header.record, 1.0, now_s, None))
            if on_progress:
                on_progress(slots.stop, num_slots)
    index.add_rows(row.id, rows, counter, written_bytes=0)
    return len(rows)
