"""The first two pages of a slab file say what it holds. They are written in turns, so that one is always whole.

Little endian: magic (8 bytes), format version u32, flags u32 (bit 0: encrypted), key id (16 bytes), fingerprint
(32 bytes), payload_bytes u64, counter u64, two length-framed (u16) texts: the model's name and the content hash of its
weights; at the end of the page the xxh3-64 of what is before it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from ..block_hash import FINGERPRINT_BYTES
from .files import PAGE_BYTES, StoreFile
from .record import FORMAT_VERSION, BadRecordError

SLAB_HEADER_BYTES = 2 * PAGE_BYTES
KEY_ID_BYTES = 16
_MAGIC = b"chatkvSL"
_FIXED = struct.Struct(f"<8sII{KEY_ID_BYTES}s{FINGERPRINT_BYTES}sQQ")
_SUM_AT = PAGE_BYTES - 8
_MAX_TEXT_BYTES = 1024


class OtherVersionError(BadRecordError):
    """A slab of a format that this version does not read."""


class SlabHeader(NamedTuple):
    key_id: bytes
    fingerprint: bytes
    payload_bytes: int
    is_encrypted: bool
    model: str
    content_sha256: str
    counter: int
    """Number of the group that was synced last."""


def write_slab_header(file: StoreFile, header: SlabHeader) -> None:
    """Into the page whose turn it is; not synced."""
    page = bytearray(PAGE_BYTES)
    flags = int(header.is_encrypted)
    _FIXED.pack_into(
        page,
        0,
        _MAGIC,
        FORMAT_VERSION,
        flags,
        header.key_id,
        header.fingerprint,
        header.payload_bytes,
        header.counter,
    )
    at = _FIXED.size
    for text in (header.model, header.content_sha256):
        encoded = text.encode()[:_MAX_TEXT_BYTES]
        struct.pack_into(f"<H{len(encoded)}s", page, at, len(encoded), encoded)
        at += 2 + len(encoded)
    page[_SUM_AT:] = xxhash.xxh3_64_digest(page[:_SUM_AT])
    file.pwrite([page], header.counter % 2 * PAGE_BYTES)


def read_slab_header(file: StoreFile) -> SlabHeader:
    """The newer of the two pages. Raises OtherVersionError, BadRecordError, OSError."""
    found: list[SlabHeader] = []
    versions: set[int] = set()
    for offset in (0, PAGE_BYTES):
        page = bytearray(PAGE_BYTES)
        file.pread_into([page], offset)
        if page[:8] == _MAGIC:
            versions.add(struct.unpack_from("<I", page, 8)[0])
        if header := _parse(page):
            found.append(header)
    if found:
        return max(found, key=lambda header: header.counter)
    if versions and FORMAT_VERSION not in versions:
        raise OtherVersionError(f"a slab of format version {min(versions)}, expected {FORMAT_VERSION}")
    raise BadRecordError("the slab's header is damaged")


def _parse(page: bytearray) -> SlabHeader | None:
    magic, version, flags, key_id, fingerprint, payload_bytes, counter = _FIXED.unpack_from(page)
    if magic != _MAGIC or version != FORMAT_VERSION or page[_SUM_AT:] != xxhash.xxh3_64_digest(page[:_SUM_AT]):
        return None
    at = _FIXED.size
    texts = []
    for _ in range(2):
        (length,) = struct.unpack_from("<H", page, at)
        texts.append(page[at + 2 : at + 2 + length].decode(errors="replace"))
        at += 2 + length
    return SlabHeader(key_id, fingerprint, payload_bytes, bool(flags & 1), texts[0], texts[1], counter)
