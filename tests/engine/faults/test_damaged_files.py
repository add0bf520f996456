"""C5: whatever has happened to the files between two lives of the store, or under its feet: a block comes back as it
was stored, or not at all, and nobody gets an exception."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_driver import Block, DiskDriver, chain, check_contents
from slab_damage import DAMAGES, REGIONS, SLOT_BYTES, drop_index, flip, index_files, slab_file, swap_slots

from chatkv.engine.store import record
from chatkv.engine.store.record import HEADER_BYTES
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES

NUM_BLOCKS = 6
DAMAGED = 3
"""Index of the block whose record is damaged."""


def slot_offset(slab: Path, block: Block) -> int:
    offset = slab.read_bytes().index(block.name) - 48
    assert (offset - SLAB_HEADER_BYTES) % SLOT_BYTES == 0
    return offset


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
