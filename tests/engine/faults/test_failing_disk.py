"""The disk is full, broken, slow, read-only or somebody else's: what was stored before is right, what could not be
stored is not visible, and the engine's thread never gets an exception."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from disk_driver import FINGERPRINT, IMAGE_BYTES, KEY, QUOTA_BYTES, Block, DiskDriver, chain, check_contents
from faulty_files import EIO, ENOSPC, EROFS, FaultyFiles, Hang, failing

from chatkv.engine.errors import StoreUnavailableError
from chatkv.engine.store import directory
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers import disk_tier
from chatkv.engine.tiers.tier import CopyState


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def driver(quick_path: Path, files: FaultyFiles) -> Iterator[DiskDriver]:
    opened = DiskDriver(quick_path / "store", files)
    yield opened
    files.hook = None
    opened.close()


def names(blocks: list[Block]) -> set[bytes]:
    return {block.name for block in blocks}


@pytest.mark.parametrize(
    ("operation", "number"),
    [("write", ENOSPC), ("write", EIO), ("sync", EIO), ("sync", ENOSPC)],
    ids=["no space at the write", "EIO at the write", "EIO at the sync", "no space at the sync"],
)
def test_c6_what_could_not_be_written_is_never_visible(
    driver: DiskDriver, files: FaultyFiles, quick_path: Path, operation: str, number: int
) -> None:
    before, failed = chain(3, seed=1), chain(3, seed=2)
    driver.save(before)
    files.hook = failing(operation, number)
    driver.put(failed)
    driver.tier.flush(0.5)
    driver.poll()
    assert driver.alive == names(before)
    assert driver.tier.stats().notice, "the person is told"
    assert check_contents(driver, before + failed).keys() == names(before)
    files.hook = None
    driver.close()
    again = DiskDriver(quick_path / "store")
    found = check_contents(again, before + failed)
    assert names(before) <= found.keys(), "what was safe before is safe still"
    again.close()


def test_c6_when_the_disk_has_room_again_the_store_goes_on(driver: DiskDriver, files: FaultyFiles) -> None:
    blocks = chain(3, seed=1)
    files.hook = failing("write", ENOSPC)
    driver.put(blocks)
    driver.tier.flush(0.5)
    driver.poll()
    assert not driver.alive
    files.hook = None
    offered = 0
    while driver.alive != names(blocks):  # whether what failed is kept or has to be offered again is the tier's affair
        driver.put([block for block in blocks if block.name not in driver.copies])
        driver.tier.flush(1.0)
        driver.poll()
        offered += 1
        assert offered < 100, driver.tier.stats()
    assert check_contents(driver, blocks).keys() == names(blocks)


def test_a_delete_that_failed_is_done_once_the_disk_works_again(driver: DiskDriver, files: FaultyFiles) -> None:
    """Forgotten and evicted blocks, tried again together; then their slots serve new blocks."""
    forgotten, evicted, kept, later = (chain(3, seed=seed) for seed in range(4))
    for blocks in (forgotten, evicted, kept):
        driver.save(blocks)
    files.hook = failing("write", EIO)
    driver.tier.remove([driver.copies[block.name] for block in forgotten], is_forgotten=True)
    driver.tier.flush(0.5)
    driver.tier.remove([driver.copies[block.name] for block in evicted], is_forgotten=False)
    files.hook = None
    driver.settle()
    for block in forgotten + evicted:
        del driver.copies[block.name]
    driver.save(later)
    assert check_contents(driver, kept + later).keys() == names(kept + later)
    assert driver.tier.stats().notice is None


def test_c5_eio_at_a_read_is_a_miss(driver: DiskDriver, files: FaultyFiles) -> None:
    blocks = chain(3, seed=1)
    driver.save(blocks)
    files.hook = failing("read", EIO)
    assert check_contents(driver, blocks) == {}
    files.hook = None
    driver.settle()
    driver.save([block for block in blocks if block.name not in driver.copies])
    assert check_contents(driver, blocks).keys() == names(blocks)


def test_c5_a_read_that_hangs_ends_the_load_at_its_deadline_and_harms_nothing_when_it_returns(
    driver: DiskDriver, files: FaultyFiles
) -> None:
    slow, other = chain(3, seed=1), chain(3, seed=2)
    driver.save(slow)
    driver.save(other)
    hang = Hang("read")
    files.hook = hang
    assert driver.load([driver.copies[block.name] for block in slow], deadline_s=0.05) == []
    assert hang.has_begun.is_set()
    files.hook = None
    path = [driver.copies[block.name] for block in other]
    job = driver.tier.start_load(path, 30.0)
    held: list[memoryview] = []
    while not job.is_done:
        held += job.take()
    expected = [block.image for block in other]
    assert [bytes(image) for image in held] == expected
    hang.release()
    assert driver.load(path) == expected, "a late read has taken a buffer that is in use"
    assert [bytes(image) for image in held] == expected, "a late read has written into a buffer that is in use"
    for image in held:
        job.release(image)


def test_c5_a_cancelled_load_gives_nothing_more(driver: DiskDriver, files: FaultyFiles) -> None:
    blocks = chain(4, seed=1)
    driver.save(blocks)
    hang = Hang("read")
    files.hook = hang
    job = driver.tier.start_load([driver.copies[block.name] for block in blocks], 30.0)
    assert hang.has_begun.wait(30)
    job.cancel()
    hang.release()
    assert job.take() == []
    assert job.is_done
    files.hook = None
    assert check_contents(driver, blocks).keys() == names(blocks), "a cancelled read says nothing of the record"


def test_a_copy_that_is_forgotten_while_it_is_read_never_comes(driver: DiskDriver, files: FaultyFiles) -> None:
    blocks = chain(4, seed=1)
    driver.save(blocks)
    copies = [driver.copies[block.name] for block in blocks]
    hang = Hang("read")
    files.hook = hang
    job = driver.tier.start_load(copies, 30.0)
    assert hang.has_begun.wait(30)
    driver.tier.remove(copies, is_forgotten=True)
    assert all(copy.state is CopyState.GONE for copy in copies)
    hang.release()
    files.hook = None
    driver.settle()
    while not job.is_done:
        assert job.take() == []
    assert job.take() == []


@pytest.mark.parametrize("operation", ["write", "sync", "read"])
def test_closing_does_not_wait_for_a_disk_that_hangs(
    quick_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "CLOSE_S", 0.1)
    monkeypatch.setattr(directory, "CLOSE_S", 0.1)
    files = FaultyFiles()
    driver = DiskDriver(quick_path / "store", files)
    blocks = chain(3, seed=1)
    driver.save(blocks)
    hang = Hang(operation)
    files.hook = hang
    if operation == "read":
        driver.tier.start_load([driver.copies[block.name] for block in blocks], 0.05)
    else:
        driver.put(chain(3, seed=2))
    assert hang.has_begun.wait(30)
    closing = Thread(target=driver.close, daemon=True)
    closing.start()
    closing.join(30)
    is_closed = not closing.is_alive()
    hang.release()
    closing.join(30)
    assert is_closed, "the service cannot stop while the disk hangs"


def test_a_read_only_directory_is_refused_with_the_reason(quick_path: Path) -> None:
    files = FaultyFiles(
        lambda operation, path: failing(operation, EROFS)(operation, path) if operation != "read" else None
    )
    with pytest.raises(StoreUnavailableError, match=r"(?i)read-only|writ"):
        DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES, files=files)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_without_the_right_to_write_is_refused_with_the_reason(quick_path: Path) -> None:
    (quick_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreUnavailableError, match=str(quick_path)):
        DiskStore.open(quick_path / "closed" / "store", KEY, QUOTA_BYTES)


def test_a_file_where_the_directory_should_be_is_refused_with_the_reason(quick_path: Path) -> None:
    (quick_path / "store").write_text("not a folder")
    with pytest.raises(StoreUnavailableError, match=str(quick_path / "store")):
        DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES)


def test_a_second_owner_is_refused_and_the_first_goes_on(driver: DiskDriver, quick_path: Path) -> None:
    blocks = chain(3, seed=1)
    driver.save(blocks)
    with pytest.raises(StoreUnavailableError, match=r"(?i)another"):
        DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES)
    assert check_contents(driver, blocks).keys() == names(blocks)


HOLD = """
import sys
from pathlib import Path
from chatkv.engine.store import directory
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers import disk_tier
store = DiskStore.open(Path(sys.argv[1]), b"k" * 32, 1 << 26)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_another_process_is_seen_and_ends_with_it(quick_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(quick_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreUnavailableError, match=r"(?i)another"):
            DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES)
        holder.kill()
    DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES).close()


def test_a_clock_set_back_loses_nothing_and_evicts_sanely(quick_path: Path) -> None:
    now_s = [2_000_000_000.0]
    directory = quick_path / "store"
    kept = chain(3, seed=1)
    with_clock = DiskDriver(directory, clock=lambda: now_s[0])
    with_clock.save(kept)
    now_s[0] -= 10 * 365 * 86_400
    with_clock.tier.touch([with_clock.copies[block.name] for block in kept])
    later = chain(3, seed=2)
    with_clock.save(later)
    with_clock.close()
    now_s[0] -= 86_400
    again = DiskDriver(directory, clock=lambda: now_s[0])
    assert check_contents(again, kept + later).keys() == names(kept + later)
    assert again.store.status().used_bytes > 0
    again.close()


def test_blocks_of_another_image_size_under_this_fingerprint_are_not_read(quick_path: Path) -> None:
    """Cannot be, by what the fingerprint covers; if it is nevertheless, it is a miss."""
    blocks = chain(3, seed=1)
    driver = DiskDriver(quick_path / "store")
    driver.save(blocks)
    driver.close()
    store = DiskStore.open(quick_path / "store", KEY, QUOTA_BYTES)
    tier = store.tier_for(FINGERPRINT.digest, 2 * IMAGE_BYTES, "faults", "0" * 64)
    assert list(tier.copies()) == []
    tier.close()
    store.close()
