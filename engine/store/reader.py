"""Reads records of a slab file and proves them. Needs no index, so it is safe beside whoever writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tiers.tier import BlockRecord
from .cipher import Cipher
from .files import StoreFile
from .record import HEADER_BYTES, BadRecordError, check_payload, parse_header
from .slab_header import SLAB_HEADER_BYTES


class RecordReader:
    """For any number of threads."""

    def __init__(
        self,
        file: StoreFile,
        fingerprint: bytes,
        payload_bytes: int,
        cipher: Cipher | None,
        data_key_of: Callable[[int], bytes | None],
    ):
        """`data_key_of`: slot -> key of its block, when there is a cipher."""
        self._file = file
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self._cipher = cipher
        self._data_key_of = data_key_of
        self.slot_bytes = HEADER_BYTES + payload_bytes

    def offset(self, slot: int) -> int:
        return SLAB_HEADER_BYTES + slot * self.slot_bytes

    def read(self, slot: int, into: memoryview, expected: BlockRecord | None = None) -> BlockRecord:
        """Fill `into` with the image and prove it: sums, fingerprint, and every field of `expected`.

        Raises BadRecordError (`into` is worthless then), OSError."""
        page, stored = bytearray(HEADER_BYTES), self._stored(into)
        if self._file.pread_into([page, stored], self.offset(slot)) != self.slot_bytes:
            raise BadRecordError("the file ends before the record does")
        return self._prove(slot, page, stored, into, expected)

    def read_run(
        self, first_slot: int, intos: Sequence[memoryview], expected: Sequence[BlockRecord]
    ) -> tuple[int, Exception | None]:
        """As `read`, of neighbouring slots with one call of the file. How many are good, and what is wrong with the
        next one."""
        pages = [bytearray(HEADER_BYTES) for _ in intos]
        storeds = [self._stored(into) for into in intos]
        parts = [part for pair in zip(pages, storeds, strict=True) for part in pair]
        try:
            is_whole = self._file.pread_into(parts, self.offset(first_slot)) == len(intos) * self.slot_bytes
        except OSError:
            is_whole = False
        for index, (into, record) in enumerate(zip(intos, expected, strict=True)):
            slot = first_slot + index
            try:
                if is_whole:
                    self._prove(slot, pages[index], storeds[index], into, record)
                else:  # one of them cannot be read, and does not take the others with it
                    self.read(slot, into, record)
            except (OSError, BadRecordError) as error:
                return index, error
        return len(intos), None

    def _stored(self, into: memoryview) -> memoryview | bytearray:
        """Where the payload is read to: ciphertext does not go into `into`."""
        assert into.nbytes == self._payload_bytes, f"{into.nbytes} bytes, an image has {self._payload_bytes}"
        return into if self._cipher is None else bytearray(self._payload_bytes)

    def _prove(
        self,
        slot: int,
        page: bytearray,
        stored: memoryview | bytearray,
        into: memoryview,
        expected: BlockRecord | None,
    ) -> BlockRecord:
        header = parse_header(page)
        if header.fingerprint != self._fingerprint or header.payload_bytes != self._payload_bytes:
            raise BadRecordError("the record belongs to another slab")
        if (header.seal is None) != (self._cipher is None):
            raise BadRecordError("the record is encrypted" if header.seal else "the record is not encrypted")
        check_payload(page, stored)
        record = header.record
        if self._cipher is not None:
            data_key = self._data_key_of(slot)
            if data_key is None:
                raise BadRecordError("the record's key is gone")
            record = self._cipher.open_record(header, data_key)
            into.cast("B")[:] = self._cipher.open_payload(header, stored, data_key)
        if expected is not None and record != expected:
            raise BadRecordError("another block lies there")
        return record
