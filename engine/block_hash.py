"""The only place where a cache key is made, for every tier.

    h_0 = BLAKE2b-128(key, fingerprint)
    h_i = BLAKE2b-128(key, h_{i-1} || u32le token ids || typed, length-framed extra)

A chain hash names a block together with everything before it. It does not depend on the process, the platform or
`PYTHONHASHSEED`. Hits compare token ids and the parent as well, so a collision can do no harm.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

from .config import BLOCK_SIZE

HASH_BYTES = 16
FINGERPRINT_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1
BYTES_PER_TOKEN = 4
BLOCK_ID_BYTES = BLOCK_SIZE * BYTES_PER_TOKEN
"""Packed ids of one block."""


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """u32 little endian. Raises struct.error or OverflowError for ids outside of 0 .. MAX_TOKEN_ID."""
    if sys.byteorder == "little" and array("I").itemsize == BYTES_PER_TOKEN:
        return array("I", token_ids).tobytes()  # a third of the time
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed_ids: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed_ids) // BYTES_PER_TOKEN}I", packed_ids)


@dataclass(frozen=True, slots=True)
class CacheFingerprint:
    """BLAKE2b-256 over canonical JSON of all facts that decide what a stored number means."""

    digest: bytes

    @classmethod
    def from_facts(cls, facts: Mapping[str, object]) -> CacheFingerprint:
        """Raises TypeError for what JSON cannot hold without doubt (non-text keys, bytes), ValueError for NaN."""
        _check_keys(facts)
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return cls(blake2b(text.encode("ascii"), digest_size=FINGERPRINT_BYTES).digest())


def _check_keys(value: object) -> None:
    """`json` would write the keys 1 and "1" alike."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"fingerprint facts need text keys, got {key!r}")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


class ExtraKind(IntEnum):
    """What an extra key is. Numbers are stored: never reuse one."""

    SALT = 1
    """A client's cache salt, in the first block."""
    IMAGE = 2
    """Content hash of an image and the offset of this block in it."""


def encode_extra(keys: Iterable[tuple[ExtraKind, bytes]]) -> bytes:
    """Kind (1 byte), length (4 bytes, little endian), payload; so no two lists of keys share an encoding."""
    return b"".join(struct.pack("<BI", kind, len(payload)) + payload for kind, payload in keys)


def salt_extra(cache_salt: bytes) -> bytes:
    """The first block's extra: nothing without a salt."""
    return encode_extra([(ExtraKind.SALT, cache_salt)]) if cache_salt else b""


class BlockHasher:
    """Chain hashes under one secret key (at most 64 bytes) for one fingerprint."""

    def __init__(self, key: bytes, fingerprint: CacheFingerprint) -> None:
        self._key = key
        self.fingerprint = fingerprint
        self.root_hash = self._digest(fingerprint.digest)

    def block_hash(self, parent_hash: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """16 bytes for one full block: `token_ids` are exactly BLOCK_SIZE ids below 2**32."""
        return self.packed_hash(parent_hash, pack_ids(token_ids), extra)

    def packed_hash(self, parent_hash: bytes, packed_ids: bytes, extra: bytes = b"") -> bytes:
        """The same for ids packed by `pack_ids`."""
        num_tokens = len(packed_ids) // BYTES_PER_TOKEN
        assert num_tokens == BLOCK_SIZE, f"only full blocks have a name, got {num_tokens} tokens"
        return self._digest(parent_hash + packed_ids + extra)

    def chain(self, packed_ids: bytes, first_extra: bytes = b"") -> list[bytes]:
        """Names of all full blocks of a prompt."""
        hashes = []
        name, extra, digest = self.root_hash, first_extra, self._digest
        for start in range(0, len(packed_ids) - BLOCK_ID_BYTES + 1, BLOCK_ID_BYTES):
            name = digest(name + packed_ids[start : start + BLOCK_ID_BYTES] + extra)
            hashes.append(name)
            extra = b""
        return hashes

    def _digest(self, message: bytes) -> bytes:
        return blake2b(message, key=self._key, digest_size=HASH_BYTES).digest()
