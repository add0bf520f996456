"""Searches files for a run of token ids, in every form in which a program might write it down."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path

RUN_LENGTH = 4
"""Ids in a row that cannot be there by chance."""


def forms_of(token_ids: Sequence[int]) -> dict[str, bytes]:
    count = len(token_ids)
    little = struct.pack(f"<{count}I", *token_ids)
    forms = {
        "u32 little endian": little,
        "u32 big endian": struct.pack(f">{count}I", *token_ids),
        "u64 little endian": struct.pack(f"<{count}Q", *token_ids),
        "varint": b"".join(varint(token_id) for token_id in token_ids),
        "sqlite varint": b"".join(sqlite_varint(token_id) for token_id in token_ids),
        "JSON": json.dumps(list(token_ids))[1:-1].encode(),
        "compact JSON": json.dumps(list(token_ids), separators=(",", ":"))[1:-1].encode(),
        "lines": "\n".join(map(str, token_ids)).encode(),
        "hex": little.hex().encode(),
        "base64": base64.b64encode(little[: 3 * (len(little) // 3)]),
    }
    if max(token_ids) < 2**16:
        forms["u16 little endian"] = struct.pack(f"<{count}H", *token_ids)
    return forms


def varint(number: int) -> bytes:
    """Protocol buffers' way: seven bits a byte, lowest first."""
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def sqlite_varint(number: int) -> bytes:
    """Seven bits a byte, highest first."""
    parts = [number & 0x7F]
    while number := number >> 7:
        parts.append(number & 0x7F | 0x80)
    return bytes(reversed(parts))


def traces_in(content: bytes, token_ids: Sequence[int], plaintext: Sequence[bytes] = ()) -> list[str]:
    """Names of the forms of any run of RUN_LENGTH ids, and of the texts, that `content` holds."""
    found = [repr(text) for text in plaintext if text in content]
    for start in range(0, len(token_ids) - RUN_LENGTH + 1):
        for name, form in forms_of(token_ids[start : start + RUN_LENGTH]).items():
            if form in content:
                found.append(f"ids from {start} on as {name}")
    return found


def traces_below(folder: Path, token_ids: Sequence[int], plaintext: Sequence[bytes] = ()) -> list[str]:
    """The same for every file below `folder`."""
    return [
        f"{file.relative_to(folder)}: {trace}"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        for trace in traces_in(file.read_bytes(), token_ids, plaintext)
    ]
