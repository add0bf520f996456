"""Neighbouring records read with one call: what is wrong with one of them costs only those behind it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_blocks import PAYLOAD_BYTES, SLOT_BYTES, Block, SlabBench, chain

from chatkv.engine.store.cipher import Cipher
from chatkv.engine.store.files import OsFile, OsFiles, StoreFile
from chatkv.engine.store.record import HEADER_BYTES, BadRecordError
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES


@pytest.fixture(params=[None, Cipher(b"m" * 32)], ids=["plain", "encrypted"])
def cipher(request: pytest.FixtureRequest) -> Cipher | None:
    return request.param


class BadSectors(OsFiles):
    """A file that fails every read which touches `bad_offset`; `sizes` of the others."""

    def __init__(self) -> None:
        self.bad_offset: int | None = None
        self.sizes: list[int] = []

    def open(self, path: Path) -> StoreFile:
        inner = super().open(path)
        assert isinstance(inner, OsFile)
        return _BadSectorFile(inner, self)


class _BadSectorFile(OsFile):
    def __init__(self, inner: OsFile, files: BadSectors) -> None:
        super().__init__(inner._fd)
        self._files = files

    def pread_into(self, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        size = sum(memoryview(part).nbytes for part in parts)
        if self._files.bad_offset is not None and offset <= self._files.bad_offset < offset + size:
            raise OSError(errno.EIO, "a bad sector")
        self._files.sizes.append(size)
        return super().pread_into(parts, offset)


def read_run(bench: SlabBench, blocks: Sequence[Block]) -> tuple[list[bytes], Exception | None]:
    """The good leading images, from slot 0 on."""
    memories = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in blocks]
    num_good, error = bench.slab.read_run(0, memories, [block.record for block in blocks])
    return [bytes(memory) for memory in memories[:num_good]], error


def damage(bench: SlabBench, slot: int, at: int) -> None:
    offset = SLAB_HEADER_BYTES + slot * SLOT_BYTES + at
    with bench.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_run_is_one_read(folder: Path, cipher: Cipher | None) -> None:
    files = BadSectors()
    bench, blocks = SlabBench(folder, cipher, files), chain(5)
    bench.save(blocks)
    files.sizes.clear()
    assert read_run(bench, blocks) == ([block.image for block in blocks], None)
    assert files.sizes == [5 * SLOT_BYTES]


@pytest.mark.parametrize("at", [0, 100, HEADER_BYTES, SLOT_BYTES - 1])
@pytest.mark.parametrize("bad_slot", [0, 2, 4])
def test_a_damaged_record_keeps_those_before_it(folder: Path, cipher: Cipher | None, bad_slot: int, at: int) -> None:
    bench, blocks = SlabBench(folder, cipher), chain(5)
    bench.save(blocks)
    damage(bench, bad_slot, at)
    images, error = read_run(bench, blocks)
    assert images == [block.image for block in blocks[:bad_slot]]
    assert isinstance(error, BadRecordError)


def test_another_block_in_one_of_the_slots_is_refused(folder: Path, cipher: Cipher | None) -> None:
    bench, blocks, others = SlabBench(folder, cipher), chain(4), chain(4, seed=2)
    bench.save(blocks)
    images, error = read_run(bench, [*blocks[:2], others[2], blocks[3]])
    assert images == [block.image for block in blocks[:2]]
    assert isinstance(error, BadRecordError)


@pytest.mark.parametrize("bad_slot", [0, 3, 4])
def test_c6_what_cannot_be_read_does_not_take_the_leading_ones_with_it(
    folder: Path, cipher: Cipher | None, bad_slot: int
) -> None:
    files = BadSectors()
    bench, blocks = SlabBench(folder, cipher, files), chain(5)
    bench.save(blocks)
    files.bad_offset = SLAB_HEADER_BYTES + bad_slot * SLOT_BYTES + 5000
    images, error = read_run(bench, blocks)
    assert images == [block.image for block in blocks[:bad_slot]]
    assert isinstance(error, OSError)


def test_a_file_that_ends_early_keeps_what_is_whole(folder: Path, cipher: Cipher | None) -> None:
    bench, blocks = SlabBench(folder, cipher), chain(5)
    bench.save(blocks)
    with bench.path.open("r+b") as file:
        file.truncate(SLAB_HEADER_BYTES + 3 * SLOT_BYTES + 100)
    images, error = read_run(bench, blocks)
    assert images == [block.image for block in blocks[:3]]
    assert isinstance(error, BadRecordError)
