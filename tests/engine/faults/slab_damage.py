"""What can happen to a slab file with images of IMAGE_BYTES: single bits, and larger harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from disk_driver import IMAGE_BYTES

from chatkv.engine.store.record import HEADER_BYTES
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES

SLAB_MAGIC = b"chatkvSL"
SLOT_BYTES = HEADER_BYTES + IMAGE_BYTES

REGIONS = {
    "magic": 0,
    "format version": 8,
    "flags": 12,
    "fingerprint": 16,
    "block hash": 48,
    "parent hash": 64,
    "position": 80,
    "length of extra": 84,
    "length of payload": 88,
    "first token id": 96,
    "last token id": 156,
    "tag of the ids": 160,
    "tag of the payload": 176,
    "checksum": 192,
    "header sum": 208,
    "padding of the header": 4000,
    "first byte of the image": HEADER_BYTES,
    "middle of the image": HEADER_BYTES + IMAGE_BYTES // 2,
    "last byte of the image": SLOT_BYTES - 1,
}


def slab_file(directory: Path) -> Path:
    (found,) = (file for file in directory.rglob("*") if file.is_file() and file.read_bytes()[:8] == SLAB_MAGIC)
    return found


def index_files(directory: Path) -> list[Path]:
    databases = [file for file in directory.rglob("*") if file.is_file() and file.read_bytes()[:6] == b"SQLite"]
    assert len(databases) == 1
    return [file for file in directory.rglob(databases[0].name + "*") if file.is_file()]


def drop_index(directory: Path) -> None:
    for file in index_files(directory):
        file.unlink()


def flip(file: Path, offset: int, bit: int = 3) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        if byte:  # The store may have cut the file meanwhile.
            opened.seek(offset)
            opened.write(bytes([byte[0] ^ (1 << bit)]))


def cut(num_bytes: int) -> Callable[[Path], None]:
    def apply(slab: Path) -> None:
        with slab.open("r+b") as file:
            file.truncate(num_bytes)

    return apply


def fill(start: int, end: int, byte: int) -> Callable[[Path], None]:
    def apply(slab: Path) -> None:
        content = bytearray(slab.read_bytes())
        content[start:end] = bytes([byte]) * len(content[start:end])
        slab.write_bytes(content)

    return apply


def slot(number: int) -> slice:
    return slice(SLAB_HEADER_BYTES + number * SLOT_BYTES, SLAB_HEADER_BYTES + (number + 1) * SLOT_BYTES)


def swap_slots(slab: Path) -> None:
    """Two whole, valid records in each other's place."""
    content = bytearray(slab.read_bytes())
    first, second = content[slot(0)], content[slot(1)]
    content[slot(0)], content[slot(1)] = second, first
    slab.write_bytes(content)


def repeat_slot(slab: Path) -> None:
    """A valid record twice."""
    content = bytearray(slab.read_bytes())
    content[slot(1)] = content[slot(0)]
    slab.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda slab: slab.unlink(),
    "empty": cut(0),
    "cut inside its own header": cut(5000),
    "cut inside a record's header": cut(slot(2).start + 100),
    "cut inside an image": cut(slot(2).stop - 10),
    "cut between records": cut(slot(4).start),
    "all zeros": fill(0, 1 << 30, 0),
    "its own header of zeros": fill(0, SLAB_HEADER_BYTES, 0),
    "a record's header of zeros": fill(slot(1).start, slot(1).start + HEADER_BYTES, 0),
    "an image of zeros": fill(slot(1).start + HEADER_BYTES, slot(1).stop, 0),
    "all ones": fill(0, 1 << 30, 255),
    "two records swapped": swap_slots,
    "one record twice": repeat_slot,
}
