"""Rows straight from the pages of a damaged SQLite file, without its trees, indexes or header.

Format: https://www.sqlite.org/fileformat2.html, sections 1.5, 1.6, 2.1 and 4. Every leaf page of a table is read by
itself, so one bad page costs the rows on it and no others. Freed pages hold nothing: the store runs with secure_delete.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_SIZE = 4096
"""Bytes. The store sets it when it creates the file, so that a damaged header cannot lie about it."""

_TABLE_LEAF = 0x0D
_OTHER_PAGES = (0x00, 0x02, 0x05, 0x0A)
"""Free, index and inner pages; one that carries the rest of a long row begins with the high byte of a page number."""
_FILE_HEADER_BYTES = 100
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_INT_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value = None | int | float | bytes
"""Text stays bytes: the reader decides what to do with bytes that are no UTF-8."""


class BadCellError(Exception):
    """A cell whose bytes are no row."""


@dataclass(frozen=True, slots=True)
class RawRow:
    row_id: int
    values: tuple[Value, ...]


def read_rows(path: Path) -> Iterator[RawRow | bytes]:
    """Every row of every table; the first bytes of a cell (or page) in place of a row that cannot be read."""
    pages = _Pages(path)
    for number in range(1, pages.num_pages + 1):
        page = pages.page(number)
        start = _FILE_HEADER_BYTES if number == 1 else 0
        if page[start] == _TABLE_LEAF:
            yield from _rows_of_page(pages, page, start)
        elif page[start] not in _OTHER_PAGES:
            yield page[:64]


def _rows_of_page(pages: _Pages, page: bytes, start: int) -> Iterator[RawRow | bytes]:
    (num_cells,) = struct.unpack_from(">H", page, start + 3)
    most = (PAGE_SIZE - start - 8) // 2
    for index in range(min(num_cells, most)):
        (at,) = struct.unpack_from(">H", page, start + 8 + 2 * index)
        try:
            yield _row(pages, page, at)
        except (BadCellError, IndexError, struct.error):
            yield page[at : at + 64]


def _row(pages: _Pages, page: bytes, at: int) -> RawRow:
    num_bytes, at = _varint(page, at)
    row_id, at = _varint(page, at)
    payload = _payload(pages, page, at, num_bytes)
    header_end, at = _varint(payload, 0)
    if header_end > len(payload):
        raise BadCellError
    values: list[Value] = []
    value_at = header_end
    while at < header_end:
        kind, at = _varint(payload, at)
        value, value_at = _value(payload, value_at, kind)
        values.append(value)
    if value_at != len(payload):
        raise BadCellError
    return RawRow(row_id, tuple(values))


def _payload(pages: _Pages, page: bytes, at: int, num_bytes: int) -> bytes:
    if num_bytes > pages.num_pages * PAGE_SIZE:
        raise BadCellError
    most = PAGE_SIZE - 35
    if num_bytes <= most:
        if at + num_bytes > PAGE_SIZE:
            raise BadCellError
        return page[at : at + num_bytes]
    least = (PAGE_SIZE - 12) * 32 // 255 - 23
    local = least + (num_bytes - least) % (PAGE_SIZE - 4)
    local = local if local <= most else least
    if at + local + 4 > PAGE_SIZE:
        raise BadCellError
    parts = [page[at : at + local]]
    (following,) = struct.unpack_from(">I", page, at + local)
    missing = num_bytes - local
    while missing > 0:
        if not 1 < following <= pages.num_pages:
            raise BadCellError
        overflow = pages.page(following)
        parts.append(overflow[4 : 4 + missing])
        missing -= PAGE_SIZE - 4
        (following,) = struct.unpack_from(">I", overflow, 0)
    return b"".join(parts)


def _value(payload: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind == 0:
        return None, at
    if kind in (8, 9):
        return kind - 8, at
    if kind == 7:
        return struct.unpack_from(">d", payload, at)[0], at + 8
    if kind in _INT_BYTES:
        end = at + _INT_BYTES[kind]
        raw: Value = int.from_bytes(payload[at:end], "big", signed=True)
    elif kind >= 12:
        end = at + (kind - 12) // 2
        raw = payload[at:end]
    else:
        raise BadCellError
    if end > len(payload):
        raise BadCellError
    return raw, end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(9):
        byte = data[at + index]
        if index == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            return value, at + index + 1
    raise AssertionError("unreachable")


class _Pages:
    """The file's pages, with what its -wal file has committed on top."""

    def __init__(self, path: Path):
        self._file = _mapped(path)
        self._wal = _committed_frames(path.with_name(path.name + "-wal"))
        self.num_pages = max([-(-len(self._file) // PAGE_SIZE), *self._wal])

    def page(self, number: int) -> bytes:
        found = self._wal.get(number)
        if found is None:
            found = self._file[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        return found.ljust(PAGE_SIZE, b"\0")


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _committed_frames(wal: Path) -> dict[int, bytes]:
    """Page number to its newest committed image. Frames are believed without checksums: rows are checked later."""
    try:
        data = wal.read_bytes()
    except OSError:
        return {}
    committed: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    salts = data[16:24]
    step = _FRAME_HEADER_BYTES + PAGE_SIZE
    for at in range(_WAL_HEADER_BYTES, len(data) - step + 1, step):
        number, size_after_commit = struct.unpack_from(">II", data, at)
        if data[at + 8 : at + 16] != salts or not 0 < number < 2**24:
            break
        pending[number] = data[at + _FRAME_HEADER_BYTES : at + step]
        if size_after_commit:
            committed |= pending
            pending = {}
    return committed
