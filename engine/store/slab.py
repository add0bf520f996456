"""One file of equal slots, all of one fingerprint: two header pages, then slot after slot, each a record and its image.

What a group of blocks goes through: `take_slot`, `write`, `sync`, `commit`. A record is complete and on the disk before
its row makes it visible, and its row is gone before the record is touched again.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence

from ..tiers.tier import BlockRecord, TierCopy
from .cipher import Cipher, RowSecret
from .files import PAGE_BYTES, StoreFile
from .index import BlockRow, BrokenIndexError, SlabRow, StoreIndex
from .reader import RecordReader
from .record import HEADER_BYTES, pack_header
from .slab_header import SLAB_HEADER_BYTES, SlabHeader, write_slab_header
from .slots import Slots
from .stored import build_copies, no_collection, unwrap_rows

_ZERO_HEADER = bytes(HEADER_BYTES)
_METADATA_BYTES = 2 * PAGE_BYTES
"""What the file system may need beside a new slot: a piece of its map of the file, split once."""


class Slab:
    """`read` and `read_run` are for any thread, everything else for one at a time. `payload_bytes`: a multiple of
    4096."""

    def __init__(self, file: StoreFile, row: SlabRow, header: SlabHeader, index: StoreIndex, cipher: Cipher | None):
        assert row.payload_bytes % PAGE_BYTES == 0, f"an image has whole pages, got {row.payload_bytes} bytes"
        self.id = row.id
        self.fingerprint = row.fingerprint
        self.payload_bytes = row.payload_bytes
        self.slot_bytes = HEADER_BYTES + row.payload_bytes
        self.content_sha256 = row.content_sha256
        self._file = file
        self._header = header
        self._counter = row.counter
        self._index = index
        self._cipher = cipher
        self._lock = threading.Lock()
        self._size = file.size
        num_slots = max(0, -(-(self._size - SLAB_HEADER_BYTES) // self.slot_bytes))
        with no_collection():
            rows, self._data_keys, unreadable = unwrap_rows(index.block_rows(self.id), cipher)
            copies, dropped = build_copies(rows, num_slots)
        self._reader = RecordReader(file, row.fingerprint, row.payload_bytes, cipher, self._data_keys.get)
        self._offset = self._reader.offset
        self._copies: list[TierCopy] | None = copies
        self._erasing: set[int] = {*dropped, *unreadable}
        """Deletes that were begun; one that failed is tried again by the next."""
        self._slots = Slots(num_slots, {copy.slot for copy in copies} | self._erasing)
        self.on_commit: Callable[[], None] = lambda: None
        """Called after each group."""
        self._sweep()

    @property
    def model(self) -> str:
        return self._header.model

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def allocated_bytes(self) -> int:
        return self._file.allocated_bytes

    def stored(self) -> list[TierCopy]:
        """All blocks, parents before children. Once, right after opening: nobody keeps the list up to date."""
        copies, self._copies = self._copies, None
        assert copies is not None, "asked before"
        return copies

    def take_slot(self) -> int:
        with self._lock:
            return self._slots.take()

    def give_back(self, slot: int) -> None:
        """It was taken, and nothing was committed for it."""
        with self._lock:
            self._data_keys.pop(slot, None)
            self._slots.give_back(slot)

    def new_bytes(self, slot: int) -> int:
        """Bound of what writing into this slot makes the file system allocate: 0 where it has done so before."""
        return 0 if self._slots.is_whole(slot) else self.slot_bytes + _METADATA_BYTES

    def write(self, slot: int, record: BlockRecord, payload: memoryview) -> None:
        """Raises OSError; ValueError when `record.extra` has more than MAX_EXTRA_BYTES."""
        assert payload.nbytes == self.payload_bytes, f"{payload.nbytes} bytes, a slot takes {self.payload_bytes}"
        if self._cipher is None:
            header, stored = pack_header(self.fingerprint, record, payload), payload
        else:
            sealed = self._cipher.seal(record, payload)
            stored = sealed.payload
            header = pack_header(self.fingerprint, sealed.record, stored, sealed.seal)
            self._data_keys[slot] = sealed.data_key
        offset = self._offset(slot)
        with self._lock:
            self._slots.note_written(slot, is_whole=False)
            if offset + self.slot_bytes > self._size:
                # First the length, then the bytes: some file systems allocate ahead for a file that grows by writing.
                self._file.truncate(offset + self.slot_bytes)
                self._size = offset + self.slot_bytes
        self._file.pwrite([header, stored], offset)
        with self._lock:
            self._slots.note_written(slot, is_whole=True)

    def sync(self) -> None:
        """Everything written is safe when this returns. Raises OSError."""
        # By this number a later opening sees that the index knows of all groups but the last.
        write_slab_header(self._file, self._header._replace(counter=self._counter + 1))
        self._file.datasync()

    def commit(self, rows: Sequence[tuple[int, BlockRecord, float, float]]) -> None:
        """Make synced blocks visible: (slot, record, hits, hit_at_s) each, parents first.

        Raises OSError, BrokenIndexError; then none of them is visible."""
        self._index.add_rows(self.id, [self._row(*row) for row in rows], self._counter + 1, self.slot_bytes * len(rows))
        self._counter += 1
        self.on_commit()

    def _row(self, slot: int, record: BlockRecord, hits: float, hit_at_s: float) -> BlockRow:
        if self._cipher is None:
            return BlockRow(slot, *record, hits, hit_at_s, None)
        secret = RowSecret(self._data_keys[slot], record.packed_ids, record.extra)
        hidden = record._replace(packed_ids=b"", extra=b"")
        return BlockRow(slot, *hidden, hits, hit_at_s, self._cipher.wrap_row(record.block_hash, secret))

    def set_hits(self, rows: Sequence[tuple[int, float, float]]) -> None:
        """(slot, hits, hit_at_s) each. Raises OSError, BrokenIndexError."""
        self._index.set_hits(self.id, rows)

    def read(self, slot: int, into: memoryview, expected: BlockRecord | None = None) -> BlockRecord:
        """As `RecordReader.read`."""
        return self._reader.read(slot, into, expected)

    def read_run(
        self, first_slot: int, intos: Sequence[memoryview], expected: Sequence[BlockRecord]
    ) -> tuple[int, Exception | None]:
        """As `RecordReader.read_run`."""
        return self._reader.read_run(first_slot, intos, expected)

    def erase(self, slots: Collection[int], *, is_punched: bool = False, is_forgotten: bool = False) -> None:
        """Rows removed and committed; headers zeroed and synced; then, with `is_punched`, the ranges given back.

        Args:
            is_forgotten: punch, punch what evicted blocks have left in free slots too, and write the index anew:
                nothing of the blocks is in any file on return.

        Raises OSError, BrokenIndexError: not all of it could be done. The slots stay taken, and the next call (also
        one with no slots) tries again."""
        # One that failed before may have been done by a call for others since.
        self._erasing.update(slot for slot in slots if not self._slots.is_free(slot))
        index_error: OSError | BrokenIndexError | None = None
        try:
            self._index.remove_rows(self.id, self._erasing, is_durable=is_forgotten)
        except (OSError, BrokenIndexError) as error:
            # A row that points to an erased record is only a miss, and a full disk needs the punch to recover.
            index_error = error
        for slot in self._erasing:
            self._data_keys.pop(slot, None)
        self._blank(sorted(self._erasing), is_punched=is_punched or is_forgotten)
        if is_forgotten:
            self.punch_free()
        if index_error:
            raise index_error
        with self._lock:
            for slot in self._erasing:
                self._slots.give_back(slot)
            self._erasing.clear()
        if is_punched or is_forgotten:
            self._cut_tail()
        if is_forgotten:
            self._index.database.rewrite()

    def punch_free(self) -> None:
        """Give back what evicted blocks have left in free slots. Raises OSError."""
        self._punch(self._slots.residue)
        self._cut_tail()

    def drop_cache(self) -> None:
        """The next reads come from the disk."""
        self._file.drop_cache()

    def close(self) -> None:
        self._file.close()

    def _blank(self, slots: Sequence[int], *, is_punched: bool) -> None:
        """No header of theirs is left; with `is_punched`, nothing at all."""
        try:
            self._zero_headers(slots)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A full file system that copies on write has no room for zeros either. A hole needs none.
            is_punched = True
        if is_punched:
            self._punch(slots)

    def _zero_headers(self, slots: Sequence[int]) -> None:
        present = [slot for slot in slots if self._offset(slot) < self._size and self._slots.is_written(slot)]
        for slot in present:
            self._file.pwrite([_ZERO_HEADER], self._offset(slot))
        if present:
            self._file.datasync()

    def _punch(self, slots: Sequence[int]) -> None:
        """Neighbours in one call."""
        for first, count in _spans(slots):
            self._file.punch(self._offset(first), count * self.slot_bytes)
        if slots:
            self._file.datasync()
        with self._lock:
            for slot in slots:
                self._slots.note_punched(slot)

    def _cut_tail(self) -> None:
        with self._lock:
            size = self._offset(self._slots.cut_tail())
            if size < self._size:
                self._file.truncate(size)
                self._size = size

    def _sweep(self) -> None:
        """What an interrupted write or delete has left: free slots that hold a record, rows that cannot be true."""
        ranges = self._file.data_ranges()
        records = []
        for slot, is_whole in _slots_in(ranges, self._slots.free, self._offset, self.slot_bytes):
            self._slots.note_written(slot, is_whole=is_whole)
            page = bytearray(HEADER_BYTES)
            self._file.pread_into([page], self._offset(slot))
            if page != _ZERO_HEADER:
                records.append(slot)
        for start, end in ranges:
            first = max(0, -(-(start - SLAB_HEADER_BYTES) // self.slot_bytes))
            self._slots.note_allocated(range(first, (end - SLAB_HEADER_BYTES) // self.slot_bytes))
        if records:
            self._blank(records, is_punched=True)
        if self._erasing:
            self.erase((), is_punched=True)
        elif records:
            self._cut_tail()


def _spans(slots: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of neighbours; `slots` in order."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and spans[-1][0] + spans[-1][1] == slot:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((slot, 1))
    return spans


def _slots_in(
    ranges: Sequence[tuple[int, int]], slots: Sequence[int], offset: Callable[[int], int], slot_bytes: int
) -> Iterator[tuple[int, bool]]:
    """Those of `slots` (in order) that a range touches, and whether one range covers the whole of it."""
    starts = [start for start, _ in ranges]
    for slot in slots:
        first, end = offset(slot), offset(slot) + slot_bytes
        number = bisect_right(starts, end - 1) - 1
        if number >= 0 and ranges[number][1] > first:
            yield slot, ranges[number][0] <= first and ranges[number][1] >= end
