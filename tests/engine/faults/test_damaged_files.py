"""C5: whatever has happened to the files between two lives of the store, or under its feet: a block comes back as it
was stored, or not at all, and nobody gets an exception."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_driver import IMAGE_BYTES, Block, DiskDriver, chain, check_contents

from chatkv.engine.store import record
from chatkv.engine.store.record import HEADER_BYTES
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES

SLAB_MAGIC = b"chatkvSL"
SLOT_BYTES = HEADER_BYTES + IMAGE_BYTES
NUM_BLOCKS = 6
DAMAGED = 3
"""Index of the block whose record is damaged."""

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


def slot_offset(slab: Path, block: Block) -> int:
    offset = slab.read_bytes().index(block.name) - 48
    assert (offset - SLAB_HEADER_BYTES) % SLOT_BYTES == 0
    return offset


def flip(file: Path, offset: int, bit: int = 3) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ (1 << bit)]))


@pytest.fixture
def blocks() -> list[Block]:
    return chain(NUM_BLOCKS, seed=1)


@pytest.fixture
def saved(quick_path: Path, blocks: list[Block]) -> Path:
    """The directory of a closed store with one chain."""
    directory = quick_path / "store"
    driver = DiskDriver(directory)
    driver.save(blocks)
    driver.close()
    return directory


def reopened(directory: Path, blocks: list[Block]) -> tuple[dict[bytes, bytes], DiskDriver]:
    driver = DiskDriver(directory)
    return check_contents(driver, blocks), driver


def names(blocks: list[Block]) -> set[bytes]:
    return {block.name for block in blocks}


def check_goes_on(driver: DiskDriver, blocks: list[Block]) -> None:
    """What is missing can be stored again, beside what is there."""
    driver.poll()
    driver.save([block for block in blocks if block.name not in driver.copies])
    assert names(blocks) == check_contents(driver, blocks).keys()
    driver.close()


@pytest.mark.parametrize("offset", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("has_index", [True, False], ids=["with the index", "without an index"])
def test_c5_a_flipped_bit_ends_the_chain_before_it(
    saved: Path, blocks: list[Block], offset: int, has_index: bool
) -> None:
    slab = slab_file(saved)
    flip(slab, slot_offset(slab, blocks[DAMAGED]) + offset)
    if not has_index:
        drop_index(saved)
    found, driver = reopened(saved, blocks)
    assert found.keys() == names(blocks[:DAMAGED])
    driver.settle()
    assert not names(blocks[DAMAGED:]) & driver.copies.keys(), "the damaged record and those below it are removed"
    check_goes_on(driver, blocks)


@pytest.mark.parametrize("offset", [48, 96, HEADER_BYTES + 17])
def test_c5_a_bit_that_flips_while_the_store_is_open_is_noticed_at_the_read(
    quick_path: Path, blocks: list[Block], offset: int
) -> None:
    driver = DiskDriver(quick_path / "store")
    driver.save(blocks)
    slab = slab_file(quick_path / "store")
    flip(slab, slot_offset(slab, blocks[DAMAGED]) + offset)
    assert check_contents(driver, blocks).keys() == names(blocks[:DAMAGED])
    driver.settle()
    assert driver.copies.keys() == names(blocks[:DAMAGED])
    assert driver.tier.stats().num_damaged >= 1
    check_goes_on(driver, blocks)


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


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("has_index", [True, False], ids=["with the index", "without an index"])
def test_c5_b2_a_damaged_slab_is_a_miss(
    saved: Path, blocks: list[Block], damage: Callable[[Path], None], has_index: bool
) -> None:
    damage(slab_file(saved))
    if not has_index:
        drop_index(saved)
    found, driver = reopened(saved, blocks)
    assert len(found) < NUM_BLOCKS or damage is swap_slots
    check_goes_on(driver, blocks)


@pytest.mark.parametrize("page", [0, 1])
def test_one_damaged_header_page_of_a_slab_costs_nothing(saved: Path, blocks: list[Block], page: int) -> None:
    """They are written in turns, so that a torn one is never the only one."""
    flip(slab_file(saved), page * 4096 + 20)
    found, driver = reopened(saved, blocks)
    assert found.keys() == names(blocks)
    driver.close()


def break_index(directory: Path, change: Callable[[Path], None]) -> None:
    main = min(index_files(directory), key=lambda file: len(file.name))
    change(main)


def overwritten(file: Path) -> None:
    file.write_bytes(b"\x55" * file.stat().st_size)


def damaged_in_the_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xaa" * (len(content) - 4096)
    file.write_bytes(content)


def halved(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def another_version(file: Path) -> None:
    with sqlite3.connect(file) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute(f"PRAGMA user_version = {version + 1}")
    database.close()


def tables_of_somebody_else(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE blocks (something INTEGER)")
    database.close()


INDEX_DAMAGES = [overwritten, damaged_in_the_middle, halved, emptied, another_version, tables_of_somebody_else]


@pytest.mark.parametrize("change", INDEX_DAMAGES)
def test_a_broken_index_is_built_again_from_the_records(
    saved: Path, blocks: list[Block], change: Callable[[Path], None]
) -> None:
    break_index(saved, change)
    found, driver = reopened(saved, blocks)
    assert found.keys() == names(blocks)
    driver.close()


def test_a_deleted_index_is_built_again_from_the_records(saved: Path, blocks: list[Block]) -> None:
    drop_index(saved)
    found, driver = reopened(saved, blocks)
    assert found.keys() == names(blocks)
    driver.close()


def test_an_index_of_an_older_moment_gives_nothing_wrong(quick_path: Path, blocks: list[Block]) -> None:
    """Put back by a backup program: it names slots that hold other blocks by now."""
    directory = quick_path / "store"
    driver = DiskDriver(directory)
    driver.save(blocks)
    driver.close()
    kept = {file: file.read_bytes() for file in index_files(directory)}
    driver = DiskDriver(directory)
    driver.remove(names(blocks[2:]), is_forgotten=False)
    others = chain(NUM_BLOCKS, seed=2)
    driver.save(others)
    driver.close()
    drop_index(directory)
    for file, content in kept.items():
        file.write_bytes(content)
    found, driver = reopened(directory, blocks + others)
    assert found.keys() >= names(blocks[:2])
    check_goes_on(driver, blocks)


def test_b7_records_of_another_format_version_are_never_read(
    quick_path: Path, blocks: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = quick_path / "store"
    with monkeypatch.context() as newer:
        newer.setattr(record, "FORMAT_VERSION", record.FORMAT_VERSION + 1)
        driver = DiskDriver(directory)
        driver.save(blocks)
        driver.close()
    found, driver = reopened(directory, blocks)
    assert found == {}
    check_goes_on(driver, blocks)


def test_a_slab_of_another_store_under_this_name_is_never_read(saved: Path, quick_path: Path) -> None:
    """The file of one fingerprint copied over that of another."""
    other = quick_path / "other"
    strangers = chain(NUM_BLOCKS, seed=9)
    driver = DiskDriver(other)
    driver.save(strangers)
    driver.close()
    shutil.copyfile(slab_file(other), slab_file(saved))
    found, driver = reopened(saved, strangers + chain(NUM_BLOCKS, seed=1))
    driver.settle()
    driver.close()
    assert not found.keys() & names(chain(NUM_BLOCKS, seed=1))
