"""What was forgotten is in no file of the store; with encryption on it never was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_driver import FINGERPRINT, Block, DiskDriver, chain, check_contents
from recording_files import RecordingFiles
from traces import forms_of, traces_below, traces_in
from volume import Change, Commit


def names(blocks: Sequence[Block]) -> set[bytes]:
    return {block.name for block in blocks}


def ids_of(blocks: Sequence[Block]) -> list[int]:
    return [token_id for block in blocks for token_id in block.record.token_ids]


def all_traces(folder: Path, blocks: Sequence[Block]) -> list[str]:
    """Of ids, and of the images: KV is the conversation."""
    images = [block.image[start : start + 64] for block in blocks for start in range(0, len(block.image), 512)]
    return traces_below(folder, ids_of(blocks), images)


@pytest.mark.parametrize("token_ids", [(1, 200, 40_000, 7, 65_535), (1, 2**20, 2**32 - 1, 5)])
def test_a_planted_run_is_found_in_every_form(tmp_path: Path, token_ids: tuple[int, ...]) -> None:
    """A control: else finding nothing would mean nothing."""
    for form in forms_of(token_ids).values():
        assert traces_in(b"before" + form + b"after", token_ids)
    assert not traces_in(b"before" + b"after", token_ids)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_forgotten_blocks_are_in_no_file(quick_path: Path, is_encrypted: bool) -> None:
    directory = quick_path / "store"
    planted, kept = chain(4, seed=1), chain(3, seed=2)
    branch = chain(2, seed=3, parent=planted[1])
    driver = DiskDriver(directory, is_encrypted=is_encrypted)
    driver.save(kept)
    driver.save(planted)
    driver.save(branch)
    if not is_encrypted:
        assert all_traces(directory, planted), "the control finds nothing"
    driver.remove(names(planted), is_forgotten=True)
    assert all_traces(directory, planted + branch) == []
    assert check_contents(driver, kept).keys() == names(kept)
    driver.close()
    assert all_traces(directory, planted + branch) == []
    driver = DiskDriver(directory, is_encrypted=is_encrypted)
    assert check_contents(driver, kept).keys() == names(kept)
    driver.close()


def test_blocks_that_are_still_queued_are_forgotten_too(quick_path: Path) -> None:
    directory = quick_path / "store"
    planted = chain(4, seed=1)
    driver = DiskDriver(directory)
    driver.put(planted)
    driver.remove(names(planted), is_forgotten=True)
    assert all_traces(directory, planted) == []
    driver.close()


def test_what_eviction_left_behind_is_forgotten_too(quick_path: Path) -> None:
    """An evicted block's bytes stay in its slot until another block takes it: forgetting must find them there."""
    directory = quick_path / "store"
    planted = chain(4, seed=1)
    driver = DiskDriver(directory)
    driver.save(planted)
    driver.remove(names(planted[2:]), is_forgotten=False)
    driver.remove(names(planted[:2]), is_forgotten=True)
    assert all_traces(directory, planted) == []
    driver.close()


def test_clearing_leaves_nothing(quick_path: Path) -> None:
    directory = quick_path / "store"
    planted = chain(4, seed=1)
    driver = DiskDriver(directory)
    driver.save(planted)
    driver.store.put_run(FINGERPRINT.digest, b"run", planted[-1].name, ids_of(planted))
    driver.store.clear()
    driver.settle()
    assert all_traces(directory, planted) == []
    assert driver.copies == {}
    driver.save(planted)
    assert check_contents(driver, planted).keys() == names(planted)
    driver.close()


def test_an_encrypted_store_never_writes_ids_or_images(quick_path: Path) -> None:
    directory = quick_path / "store"
    directory.mkdir(mode=0o700)
    files = RecordingFiles(directory)
    planted = chain(4, seed=1)
    driver = DiskDriver(directory, files, is_encrypted=True)
    driver.save(planted)
    assert check_contents(driver, planted).keys() == names(planted)
    driver.remove(names(planted[2:]), is_forgotten=False)
    driver.remove(names(planted), is_forgotten=True)
    driver.close()
    images = [block.image[start : start + 64] for block in planted for start in range(0, len(block.image), 512)]
    written = [entry.data for entry in files.log if isinstance(entry, Change)]
    written += [content for entry in files.log if isinstance(entry, Commit) for content in entry.database.values()]
    assert len(written) > 4
    assert all(traces_in(data, ids_of(planted), images) == [] for data in written)


def test_a_run_dies_with_its_block(quick_path: Path) -> None:
    directory = quick_path / "store"
    planted, kept = chain(2, seed=1), chain(2, seed=2)
    driver = DiskDriver(directory)
    driver.save(planted)
    driver.save(kept)
    driver.store.put_run(FINGERPRINT.digest, b"planted", planted[-1].name, ids_of(planted))
    driver.store.put_run(FINGERPRINT.digest, b"kept", kept[-1].name, ids_of(kept))
    driver.remove(names(planted), is_forgotten=True)
    assert [key for key, _ in driver.store.runs()] == [b"kept"]
    assert all_traces(directory, planted) == []
    driver.close()
