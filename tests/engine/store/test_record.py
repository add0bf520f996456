"""What a record says, and that no damaged one says anything."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.store.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_EXTRA_BYTES,
    BadRecordError,
    Seal,
    check_payload,
    pack_header,
    parse_header,
)
from chatkv.engine.tiers.tier import BlockRecord

FINGERPRINT = bytes(range(32))
RECORD = BlockRecord(b"h" * 16, b"p" * 16, 7, bytes(range(64)), b"extra")
PAYLOAD = bytes(range(256)) * 32


def test_the_bytes_of_a_header_are_fixed() -> None:
    """Records outlive versions: when this fails, FORMAT_VERSION has to go up."""
    header = pack_header(FINGERPRINT, RECORD, PAYLOAD)
    assert FORMAT_VERSION == 1
    assert len(header) == HEADER_BYTES
    assert header[:16] == b"chatkvBK" + bytes.fromhex("01000000 00000000")
    assert header[16:192] == (
        FINGERPRINT + b"h" * 16 + b"p" * 16 + bytes.fromhex("07000000 05000000 0020000000000000")
        + bytes(range(64)) + bytes(32)
    )  # fmt: skip
    assert header[192:216].hex() == "0af05d9b178f3f10c819fef598a6055ac925b50e7b045f9a"
    assert header[216:] == b"extra" + bytes(HEADER_BYTES - 221)


@given(
    record=st.builds(
        BlockRecord,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16),
        st.integers(0, 2**32 - 1),
        st.binary(min_size=64, max_size=64),
        st.binary(max_size=MAX_EXTRA_BYTES),
    ),
    payload=st.binary(max_size=4096),
    seal=st.none() | st.builds(Seal, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)),
)
def test_a_header_says_what_was_packed(record: BlockRecord, payload: bytes, seal: Seal | None) -> None:
    packed = pack_header(FINGERPRINT, record, payload, seal)
    header = parse_header(packed)
    assert (header.fingerprint, header.record, header.payload_bytes, header.seal) == (
        FINGERPRINT,
        record,
        len(payload),
        seal,
    )
    check_payload(packed, payload)


def test_c5_no_flipped_bit_of_the_header_goes_unnoticed() -> None:
    packed = bytes(pack_header(FINGERPRINT, RECORD, PAYLOAD))
    for number in range(8 * HEADER_BYTES):
        flipped = bytearray(packed)
        flipped[number // 8] ^= 1 << number % 8
        with pytest.raises(BadRecordError):
            parse_header(flipped)


@given(st.integers(0, 8 * len(PAYLOAD) - 1))
def test_c5_no_flipped_bit_of_the_payload_goes_unnoticed(number: int) -> None:
    packed = pack_header(FINGERPRINT, RECORD, PAYLOAD)
    flipped = bytearray(PAYLOAD)
    flipped[number // 8] ^= 1 << number % 8
    with pytest.raises(BadRecordError):
        check_payload(packed, flipped)


def test_a_payload_under_another_blocks_header_is_noticed() -> None:
    other = pack_header(FINGERPRINT, RECORD._replace(block_hash=b"o" * 16), bytes(len(PAYLOAD)))
    with pytest.raises(BadRecordError):
        check_payload(other, PAYLOAD)


@pytest.mark.parametrize("page", [bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES, b"", b"chatkvBK"])
def test_what_is_no_header_is_refused(page: bytes) -> None:
    with pytest.raises(BadRecordError):
        parse_header(bytearray(page))


def test_another_format_version_is_refused_though_its_sums_are_right() -> None:
    packed = pack_header(FINGERPRINT, RECORD, PAYLOAD)
    packed[8] = FORMAT_VERSION + 1
    packed[208:216] = bytes(8)
    packed[208:216] = xxhash.xxh3_64_digest(packed)
    with pytest.raises(BadRecordError, match="version"):
        parse_header(packed)


def test_an_extra_that_does_not_fit_is_refused() -> None:
    pack_header(FINGERPRINT, RECORD._replace(extra=bytes(MAX_EXTRA_BYTES)), PAYLOAD)
    with pytest.raises(ValueError, match=str(MAX_EXTRA_BYTES)):
        pack_header(FINGERPRINT, RECORD._replace(extra=bytes(MAX_EXTRA_BYTES + 1)), PAYLOAD)
