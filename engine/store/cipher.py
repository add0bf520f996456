"""Optional encryption at rest: every block under a data key of its own, which lies, wrapped, in the block's index row.

AES-256-GCM throughout. A data key encrypts one block once, so its nonces may be fixed: 0 for the image, 1 for the ids.
Dropping the row drops the key, and with it all that can read the record.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..tiers.tier import BlockRecord
from .files import Buffer
from .record import IDS_BYTES, TAG_BYTES, BadRecordError, Header, Seal

KEY_BYTES = 32
_NONCE_BYTES = 12
_PAYLOAD_NONCE = (0).to_bytes(_NONCE_BYTES, "little")
_IDS_NONCE = (1).to_bytes(_NONCE_BYTES, "little")


class SealedBlock(NamedTuple):
    """What goes to the disk in a block's place."""

    record: BlockRecord
    payload: memoryview
    seal: Seal
    data_key: bytes


class RowSecret(NamedTuple):
    """What an index row of an encrypted block hides."""

    data_key: bytes
    packed_ids: bytes
    extra: bytes


class Cipher:
    """Under one master key of KEY_BYTES bytes."""

    def __init__(self, master_key: bytes):
        if len(master_key) != KEY_BYTES:
            raise ValueError(f"the master key must have {KEY_BYTES} bytes, got {len(master_key)}")
        self._master = AESGCM(master_key)

    def seal(self, record: BlockRecord, payload: Buffer) -> SealedBlock:
        data_key = os.urandom(KEY_BYTES)
        cipher = AESGCM(data_key)
        sealed = memoryview(cipher.encrypt(_PAYLOAD_NONCE, payload, record.block_hash))
        hidden = cipher.encrypt(_IDS_NONCE, record.packed_ids + record.extra, record.block_hash)
        stored = record._replace(packed_ids=hidden[:IDS_BYTES], extra=hidden[IDS_BYTES:-TAG_BYTES])
        seal = Seal(hidden[-TAG_BYTES:], bytes(sealed[-TAG_BYTES:]))
        return SealedBlock(stored, sealed[:-TAG_BYTES], seal, data_key)

    def open_record(self, header: Header, data_key: bytes) -> BlockRecord:
        """The record in the clear. Raises BadRecordError."""
        record, seal = header.record, header.seal
        assert seal is not None
        try:
            plain = AESGCM(data_key).decrypt(
                _IDS_NONCE, record.packed_ids + record.extra + seal.ids_tag, record.block_hash
            )
        except InvalidTag:
            raise BadRecordError("the record was encrypted under another key") from None
        return record._replace(packed_ids=plain[:IDS_BYTES], extra=plain[IDS_BYTES:])

    def open_payload(self, header: Header, payload: Buffer, data_key: bytes) -> bytes:
        """`payload` as stored. Raises BadRecordError."""
        assert header.seal is not None
        try:
            return AESGCM(data_key).decrypt(
                _PAYLOAD_NONCE, b"".join((payload, header.seal.payload_tag)), header.record.block_hash
            )
        except InvalidTag:
            raise BadRecordError("the image was encrypted under another key") from None

    def wrap_row(self, block_hash: bytes, secret: RowSecret) -> bytes:
        return self._wrap(b"".join(secret), block_hash)

    def unwrap_row(self, block_hash: bytes, wrapped: bytes) -> RowSecret:
        """Raises BadRecordError: another master key, or a damaged row."""
        plain = self._unwrap(wrapped, block_hash)
        return RowSecret(plain[:KEY_BYTES], plain[KEY_BYTES : KEY_BYTES + IDS_BYTES], plain[KEY_BYTES + IDS_BYTES :])

    def wrap_run(self, key: bytes, ids: bytes) -> bytes:
        return self._wrap(ids, key)

    def unwrap_run(self, key: bytes, wrapped: bytes) -> bytes:
        """Raises BadRecordError."""
        return self._unwrap(wrapped, key)

    def _wrap(self, plain: bytes, name: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._master.encrypt(nonce, plain, name)

    def _unwrap(self, wrapped: bytes, name: bytes) -> bytes:
        try:
            return self._master.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], name)
        except (InvalidTag, ValueError):
            raise BadRecordError("the index row was encrypted under another key") from None
