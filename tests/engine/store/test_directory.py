"""Who may use a store, and what is swept when it opens."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from store_blocks import (
    FINGERPRINT,
    MASTER_KEY,
    PAYLOAD_BYTES,
    all_bytes,
    chain,
    fill,
    names,
    open_store,
    stored_names,
    with_blocks,
)

from chatkv.engine.errors import StoreUnavailableError
from chatkv.engine.store import folder as folder_module
from chatkv.engine.store.files import OsFiles
from chatkv.engine.store.record import FORMAT_VERSION


def test_everything_is_private_and_tagged_as_a_cache(home: Path) -> None:
    with_blocks(home)
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}
    assert (home / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_what_lies_behind_a_link_counts(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    with_blocks(link)
    store = open_store(link)
    assert store.status().used_bytes == OsFiles().allocated_bytes(home) > 0
    store.close()


def test_an_open_folder_is_closed_to_others(home: Path) -> None:
    home.mkdir(mode=0o755)
    open_store(home).close()
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_second_owner_is_told_so_and_the_lock_ends_with_its_holder(home: Path) -> None:
    first = open_store(home)
    with pytest.raises(StoreUnavailableError, match="in use by another chatkv"):
        open_store(home)
    first.close()
    open_store(home).close()


def test_children_do_not_inherit_the_lock(home: Path) -> None:
    store = open_store(home)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        store.close()
        open_store(home).close()
        child.communicate(b"\n")


def test_a_removed_lock_file_makes_no_second_owner_of_the_next_opening(home: Path) -> None:
    open_store(home).close()
    (home / "store.lock").unlink()
    open_store(home).close()
    assert (home / "store.lock").exists()


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EROFS, "read-only"), (errno.EACCES, "may not be written"), (errno.ENOSPC, "No space")]
)
@pytest.mark.parametrize("step", ["lock", "tag"])
def test_a_folder_that_cannot_be_written_is_refused_with_a_clear_word(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if step == "lock":
        monkeypatch.setattr(folder_module.StoreFolder, "claim", fail)
    else:
        monkeypatch.setattr(OsFiles, "open", fail)
    with pytest.raises(StoreUnavailableError, match=words) as caught:
        open_store(home)
    assert str(home) in str(caught.value)
    monkeypatch.undo()
    open_store(home).close()


def test_the_files_of_somebody_else_are_left_alone(home: Path) -> None:
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreUnavailableError, match=r"thesis\.tex"):
        open_store(home)
    assert (home / "thesis.tex").read_text() == "years of work"


def test_orphans_and_temporary_files_are_swept(home: Path) -> None:
    with_blocks(home)
    orphans = ["index2.db", "x.slab", "f" * 63 + ".slab", "e" * 64 + ".slab", "index.db.new", "a.tmp"]
    for name in orphans:
        (home / name).write_bytes(b"x" * 100_000)
    store = open_store(home)
    assert not [name for name in orphans if (home / name).exists()]
    assert stored_names(store) == names(chain(3))
    store.close()


def test_b7_a_slab_of_another_format_version_is_swept(home: Path) -> None:
    with_blocks(home)
    [slab] = home.glob("*.slab")
    content = bytearray(slab.read_bytes())
    for page in (0, 4096):
        content[page + 8 : page + 12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    slab.write_bytes(content)
    store = open_store(home)
    assert not slab.exists()
    assert store.status().slabs == ()
    store.close()


def test_under_another_key_the_store_starts_empty(home: Path) -> None:
    with_blocks(home)
    store = open_store(home, key=b"another" * 4)
    assert store.status().slabs == ()
    assert not list(home.glob("*.slab"))
    store.close()


@pytest.mark.parametrize("was_encrypted", [True, False])
def test_when_encryption_is_switched_nothing_of_the_other_kind_stays(home: Path, was_encrypted: bool) -> None:
    blocks = chain(3)
    first = open_store(home, master_key=MASTER_KEY if was_encrypted else None)
    fill(first, blocks)
    first.close()
    second = open_store(home, master_key=None if was_encrypted else MASTER_KEY)
    assert not list(home.glob("*.slab"))
    assert stored_names(second) == set()
    second.close()
    assert blocks[0].name not in all_bytes(home)


def test_encrypted_blocks_outlive_a_restart_and_not_their_index(home: Path) -> None:
    blocks = chain(4)
    store = open_store(home, master_key=MASTER_KEY)
    fill(store, blocks)
    store.close()
    left = all_bytes(home)
    assert not [block for block in blocks if block.record.packed_ids in left or block.image[:64] in left]
    store = open_store(home, master_key=MASTER_KEY)
    assert stored_names(store) == names(blocks)
    assert store.verify(lambda *_: None, lambda: False).num_damaged == 0
    store.close()
    (home / "index.db").unlink()
    store = open_store(home, master_key=MASTER_KEY)
    assert stored_names(store) == set()
    store.close()


def test_after_a_crash_all_slabs_are_swept_also_those_that_no_model_opens(home: Path, folder: Path) -> None:
    [block] = chain(1)
    store = open_store(home)
    slab = store._slabs.create(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    slab.write(slab.take_slot(), block.record, memoryview(block.image))
    slab.sync()
    shutil.copytree(home, folder / "crashed")
    slab.close()
    store.close()
    store = open_store(folder / "crashed")
    assert block.record.packed_ids not in all_bytes(folder / "crashed")
    store.close()
