"""A block on disk: a header page that says what it is, then its image. The record is the truth, the index a hint.

All numbers are little endian. Byte offsets in the header:

      0  magic                 8 bytes
      8  format version        u32
     12  flags                 u32, bit 0: encrypted
     16  fingerprint           32 bytes
     48  block_hash            16 bytes
     64  parent_hash           16 bytes
     80  position              u32
     84  length of extra       u32
     88  length of payload     u64
     96  token ids             16 x u32
    160  tag of the ids        16 bytes (encrypted records; else zeros)
    176  tag of the payload    16 bytes (the same)
    192  checksum              xxh3-128 of the header with both sums zero, then the payload as it is stored
    208  header sum            xxh3-64 of the header with this field zero: so a header can be trusted by itself
    216  extra                 then zeros to the end
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from ..block_hash import FINGERPRINT_BYTES, HASH_BYTES
from ..config import BLOCK_SIZE
from ..tiers.tier import BlockRecord
from .files import Buffer

HEADER_BYTES = 4096
FORMAT_VERSION = 1
MAGIC = b"chatkvBK"
TAG_BYTES = 16
IDS_BYTES = 4 * BLOCK_SIZE

_FIXED = struct.Struct(f"<8sII{FINGERPRINT_BYTES}s{HASH_BYTES}s{HASH_BYTES}sIIQ{IDS_BYTES}s{TAG_BYTES}s{TAG_BYTES}s")
_CHECKSUM_AT = _FIXED.size
_HEADER_SUM_AT = _CHECKSUM_AT + 16
_EXTRA_AT = _HEADER_SUM_AT + 8
assert (_CHECKSUM_AT, _EXTRA_AT) == (192, 216)

MAX_EXTRA_BYTES = HEADER_BYTES - _EXTRA_AT
_IS_ENCRYPTED = 1
_NO_TAG = bytes(TAG_BYTES)


class BadRecordError(Exception):
    """What lies in the slot is not the block that was asked for, or not whole."""


class Seal(NamedTuple):
    """Authentication tags of an encrypted record."""

    ids_tag: bytes
    payload_tag: bytes


class Header(NamedTuple):
    """`record.packed_ids` and `record.extra` as they are stored: ciphertext when there is a `seal`."""

    fingerprint: bytes
    record: BlockRecord
    payload_bytes: int
    seal: Seal | None


def pack_header(fingerprint: bytes, record: BlockRecord, payload: Buffer, seal: Seal | None = None) -> bytearray:
    """HEADER_BYTES bytes. ValueError: `record.extra` is longer than MAX_EXTRA_BYTES."""
    extra = record.extra
    if len(extra) > MAX_EXTRA_BYTES:
        raise ValueError(f"a block's extra may have {MAX_EXTRA_BYTES} bytes, this one has {len(extra)}")
    assert len(record.packed_ids) == IDS_BYTES, f"a block has {IDS_BYTES} bytes of ids, got {len(record.packed_ids)}"
    header = bytearray(HEADER_BYTES)
    ids_tag, payload_tag = seal or (_NO_TAG, _NO_TAG)
    num_payload_bytes = memoryview(payload).nbytes
    _FIXED.pack_into(
        header,
        0,
        MAGIC,
        FORMAT_VERSION,
        _IS_ENCRYPTED if seal else 0,
        fingerprint,
        record.block_hash,
        record.parent_hash,
        record.position,
        len(extra),
        num_payload_bytes,
        record.packed_ids,
        ids_tag,
        payload_tag,
    )
    header[_EXTRA_AT : _EXTRA_AT + len(extra)] = extra
    header[_CHECKSUM_AT:_HEADER_SUM_AT] = _checksum(header, payload)
    header[_HEADER_SUM_AT:_EXTRA_AT] = xxhash.xxh3_64_digest(header)
    return header


def parse_header(header: bytearray) -> Header:
    """Of HEADER_BYTES bytes; says nothing of the payload. Raises BadRecordError."""
    if len(header) != HEADER_BYTES:
        raise BadRecordError(f"a header has {HEADER_BYTES} bytes, got {len(header)}")
    magic, version, flags, fingerprint, block_hash, parent_hash, position, extra_length, payload_bytes, ids, *tags = (
        _FIXED.unpack_from(header)
    )
    if magic != MAGIC:
        raise BadRecordError("no record here")
    if version != FORMAT_VERSION:
        raise BadRecordError(f"format version {version}, expected {FORMAT_VERSION}")
    header_sum = bytes(header[_HEADER_SUM_AT:_EXTRA_AT])
    unsummed = bytearray(header)
    unsummed[_HEADER_SUM_AT:_EXTRA_AT] = bytes(8)
    if xxhash.xxh3_64_digest(unsummed) != header_sum:
        raise BadRecordError("the header's checksum is wrong")
    if extra_length > MAX_EXTRA_BYTES or flags & ~_IS_ENCRYPTED:
        raise BadRecordError("the header holds impossible values")
    extra = bytes(header[_EXTRA_AT : _EXTRA_AT + extra_length])
    record = BlockRecord(block_hash, parent_hash, position, ids, extra)
    seal = Seal(*tags) if flags & _IS_ENCRYPTED else None
    return Header(fingerprint, record, payload_bytes, seal)


def check_payload(header: bytearray, payload: Buffer) -> None:
    """The payload (as stored) belongs to this parsed header and is whole. Raises BadRecordError."""
    unsummed = bytearray(header)
    unsummed[_CHECKSUM_AT:_EXTRA_AT] = bytes(_EXTRA_AT - _CHECKSUM_AT)
    if _checksum(unsummed, payload) != header[_CHECKSUM_AT:_HEADER_SUM_AT]:
        raise BadRecordError("the record's checksum is wrong")


def _checksum(unsummed_header: bytearray, payload: Buffer) -> bytes:
    state = xxhash.xxh3_128(unsummed_header)
    state.update(payload)
    return state.digest()
