"""The store as a whole: who may use it, what it sweeps, what the quota covers."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from store_blocks import (
    FINGERPRINT,
    MASTER_KEY,
    OTHER_FINGERPRINT,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    Block,
    all_bytes,
    allocated,
    chain,
    fill,
    names,
    open_store,
    stored_names,
)

from chatkv.engine.errors import EngineError, StoreUnavailableError
from chatkv.engine.store import folder as folder_module
from chatkv.engine.store.files import OsFiles
from chatkv.engine.store.index import StoreIndex
from chatkv.engine.store.record import FORMAT_VERSION
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES
from chatkv.engine.store.space import INDEX_RESERVE_BYTES
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.tier import TierCopy


@pytest.fixture
def home(folder: Path) -> Path:
    return folder / "kv"


# Who may use it


def test_everything_is_private_and_tagged_as_a_cache(home: Path) -> None:
    with_blocks(home)
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}
    assert (home / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def with_blocks(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(3))
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
    assert "memory only" in str(caught.value)
    monkeypatch.undo()
    open_store(home).close()


def test_the_files_of_somebody_else_are_left_alone(home: Path) -> None:
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreUnavailableError, match=r"thesis\.tex"):
        open_store(home)
    assert (home / "thesis.tex").read_text() == "years of work"


# What is swept


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


# The index is a hint


@pytest.mark.parametrize("damage", ["deleted", "garbage", "older", "foreign", "cut"])
def test_a_bad_index_is_made_again_from_the_records(home: Path, folder: Path, damage: str) -> None:
    other = folder / "other"
    with_blocks(home)
    with_blocks(other)
    older = (home / "index.db").read_bytes()
    store = open_store(home)
    for seed in (2, 3):
        fill(store, chain(4, seed=seed))
    store.close()
    index = home / "index.db"
    if damage == "deleted":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"SQLite format 3\0" + os.urandom(30_000))
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:5000])
    else:
        index.write_bytes(older if damage == "older" else (other / "index.db").read_bytes())
    progress: list[tuple[int, int]] = []
    store = open_store(home, on_progress=lambda done, total: progress.append((done, total)))
    assert stored_names(store) == names(chain(3) + chain(4, seed=2) + chain(4, seed=3))
    assert progress[-1] == (11, 11)
    assert store.verify(lambda *_: None, lambda: False).num_damaged == 0
    store.close()


def test_rebuilding_keeps_one_of_two_and_none_without_its_parent(home: Path) -> None:
    blocks = chain(5)
    store = open_store(home)
    fill(store, blocks)
    store.close()
    (home / "index.db").unlink()
    [slab] = home.glob("*.slab")
    content = bytearray(slab.read_bytes())

    def at(slot: int) -> slice:
        return slice(SLAB_HEADER_BYTES + slot * SLOT_BYTES, SLAB_HEADER_BYTES + (slot + 1) * SLOT_BYTES)

    content += content[at(1)]
    content[at(3).start + 100] ^= 1
    slab.write_bytes(content)
    store = open_store(home)
    assert stored_names(store) == names(blocks[:3])
    store.close()
    left = slab.read_bytes()
    assert [left.count(block.record.packed_ids) for block in blocks] == [1, 1, 1, 0, 0]


# Room


def test_what_does_not_fit_goes_at_opening_coldest_first(home: Path) -> None:
    now_s = [1000.0]
    store = open_store(home, clock=lambda: now_s[0])
    for seed in range(1, 5):
        now_s[0] += 3600
        fill(store, chain(20, seed=seed), FINGERPRINT if seed % 2 else OTHER_FINGERPRINT)
    store.close()
    quota = INDEX_RESERVE_BYTES + 45 * SLOT_BYTES + 200_000
    store = open_store(home, quota_bytes=quota, clock=lambda: now_s[0])
    assert allocated(home) <= quota
    kept = stored_names(store) | stored_names(store, OTHER_FINGERPRINT)
    assert names(chain(20, seed=4) + chain(20, seed=3)) <= kept
    assert not names(chain(20, seed=1)) & kept
    store.close()


def test_pinned_blocks_of_other_models_stay(home: Path) -> None:
    pinned, loose = chain(10, seed=1), chain(10, seed=2)
    store = open_store(home, pinned_in=lambda fingerprint: names(pinned) if fingerprint == FINGERPRINT else ())
    fill(store, [*pinned, *loose])
    assert store.evict_elsewhere(1 << 30) >= 10 * PAYLOAD_BYTES
    assert store.oldest_elsewhere() is None
    assert stored_names(store) == names(pinned)
    store.close()


def test_a_clock_that_was_set_back_keeps_nothing_from_being_evicted(home: Path) -> None:
    now_s = [2_000_000_000.0]
    store = open_store(home, clock=lambda: now_s[0])
    fill(store, chain(2, seed=1))
    now_s[0] = 1_000_000_000.0
    oldest = store.oldest_elsewhere()
    assert oldest is not None
    assert oldest <= now_s[0]
    store.close()


def test_a_rebuild_that_was_interrupted_is_done_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(home)
    (home / "index.db").unlink()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(StoreIndex, "add_rows", fail)
        with pytest.raises(StoreUnavailableError, match="broken"):
            open_store(home)
    store = open_store(home)
    assert stored_names(store) == names(chain(3))
    store.close()


def test_leaves_go_before_what_is_above_them(home: Path) -> None:
    stem = chain(4, seed=1)
    branch = chain(2, seed=2, parent=stem[1])
    store = open_store(home)
    fill(store, [*stem, *branch])
    for _ in range(5):
        assert store.evict_elsewhere(1) >= PAYLOAD_BYTES
        left = stored_names(store)
        assert all(above.name in left for above, below in pairwise(stem) if below.name in left)
        assert branch[0].name in left or branch[1].name not in left
    assert left == {stem[0].name}
    store.evict_elsewhere(1)
    assert store.status().slabs == (), "an empty slab goes as a whole"
    store.close()


def test_the_open_tier_is_not_evicted_from_outside(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(3, seed=1))
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    assert store.oldest_elsewhere() is None
    assert store.evict_elsewhere(1 << 30) == 0
    assert len(tier.copies()) == 3
    with pytest.raises(EngineError, match="in use"):
        store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    store.close()


def test_d1_lowering_the_quota_shrinks_the_directory(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(100, seed=1), OTHER_FINGERPRINT)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    for block in chain(100, seed=2):
        above = {copy.record.block_hash: copy for copy in tier.copies()}.get(block.record.parent_hash)
        assert tier.store(block.record, above, memoryview(block.image), "", False)
        assert tier.flush(30)
    for num_blocks in (150, 60, 10):
        quota = INDEX_RESERVE_BYTES + num_blocks * SLOT_BYTES + 400_000
        store.set_quota(quota)
        assert allocated(home) <= quota
        assert 0 < len(tier.copies()) <= num_blocks + 34
    store.close()


# Forget, prune, clear, verify


def test_forgetting_elsewhere_leaves_what_others_own_and_nothing_else(home: Path) -> None:
    stem = chain(4, seed=1)
    mine, theirs = chain(3, seed=2, parent=stem[3]), chain(3, seed=3, parent=stem[1])
    store = open_store(home)
    fill(store, [*stem, *mine, *theirs])
    owned = names([*stem, mine[0]])
    assert store.forget_elsewhere(FINGERPRINT, owned, names(theirs)) == (5, 2)
    assert stored_names(store) == names([*stem[:2], *theirs])
    left = all_bytes(home)
    for block in [*stem[2:], *mine]:
        assert block.record.packed_ids not in left
        assert block.image[:64] not in left
    assert store.forget_elsewhere(b"?" * 32, owned, set()) == (0, 0)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    with pytest.raises(EngineError, match="in use"):
        store.forget_elsewhere(FINGERPRINT, owned, set())
    tier.close()
    store.close()


def test_scrubbing_removes_what_evicted_blocks_have_left(home: Path) -> None:
    store = open_store(home)
    for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
        fill(store, chain(4, seed=fingerprint[0] + 1), fingerprint)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    evicted = [copy for copy in tier.copies() if copy.record.position >= 2]
    tier.remove(evicted, is_forgotten=False)
    assert tier.flush(30)
    image = chain(4, seed=1)[3].image
    assert image[:64] in all_bytes(home), "evicted blocks are only overwritten"
    store.scrub()
    assert image[:64] not in all_bytes(home)
    assert len(tier.copies()) == 2
    store.close()


def test_pruning_removes_the_slabs_of_models_that_are_gone(home: Path) -> None:
    store = open_store(home)
    fill(store, chain(3, seed=1), FINGERPRINT, sha256="a")
    fill(store, chain(5, seed=2), OTHER_FINGERPRINT, sha256="b")
    (home / "left.tmp").write_bytes(b"x" * 10_000)
    result = store.prune({"a", "c"})
    assert (result.num_slabs, result.num_blocks, result.num_files) == (1, 5, 1)
    assert result.freed_bytes >= 5 * SLOT_BYTES
    assert [slab.fingerprint for slab in store.status().slabs] == [FINGERPRINT]
    store.close()


def test_clearing_leaves_nothing(home: Path) -> None:
    blocks, others = chain(5, seed=1, extra=b"secret salt"), chain(5, seed=2)
    store = open_store(home)
    fill(store, others, OTHER_FINGERPRINT)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, blocks)
    store.put_run(FINGERPRINT, b"r" * 16, blocks[-1].name, [77777, 88888, 99999])
    store.set_constant("rate", 1)
    assert store.find_run(b"r" * 16) == (77777, 88888, 99999)
    assert store.clear() == 10
    assert store.find_run(b"r" * 16) is None
    assert list(tier.copies()) == []
    left = all_bytes(home)
    for block in [*blocks, *others]:
        assert block.record.packed_ids not in left
        assert block.name not in left
        assert block.image[:64] not in left
    assert store.constant("rate") == 1
    fill_open(tier, blocks)
    store.close()
    store = open_store(home)
    assert stored_names(store) == names(blocks)
    store.close()


def fill_open(tier: DiskTier, blocks: Sequence[Block]) -> None:
    copies: dict[bytes, TierCopy | None] = {}
    for block in blocks:
        copies[block.name] = tier.store(
            block.record, copies.get(block.record.parent_hash), memoryview(block.image), "", False
        )
    assert tier.flush(30)


@pytest.mark.parametrize("is_open", [True, False])
def test_verifying_finds_and_removes_bad_records(home: Path, is_open: bool) -> None:
    blocks, others = chain(6, seed=1), chain(3, seed=2)
    store = open_store(home)
    fill(store, others, OTHER_FINGERPRINT)
    fill(store, blocks)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha") if is_open else None
    path = home / f"{FINGERPRINT.hex()}.slab"
    content = path.read_bytes()
    at = content.index(blocks[3].image[:64])
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\0")
    told: list[tuple[int, int]] = []
    result = store.verify(lambda done, total: told.append((done, total)), lambda: False)
    assert told == [(number, 9) for number in range(1, 10)]
    assert (result.num_checked, result.num_damaged, result.damaged) == (9, 1, {blocks[3].name})
    assert result.is_complete
    if tier is not None:
        assert tier.flush(30)
        tier.close()
    assert stored_names(store) == names(blocks[:3])
    assert stored_names(store, OTHER_FINGERPRINT) == names(others)
    assert not store.verify(lambda *_: None, lambda: True).is_complete
    store.close()


def test_verifying_beside_a_writer_finds_nothing_bad(home: Path) -> None:
    """Slots are erased and reused while they are read."""
    store = open_store(home)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, chain(40, seed=0))
    is_over = threading.Event()

    def write() -> None:
        for seed in range(1, 12):
            tier.remove([copy for copy in tier.copies() if copy.record.position >= 3], is_forgotten=False)
            fill_open(tier, chain(37, seed=seed))
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        assert store.verify(lambda *_: None, lambda: False).num_damaged == 0
    writer.join()
    store.close()


# Numbers and runs


def test_numbers_are_kept(home: Path) -> None:
    store = open_store(home)
    store.set_constant("rate", {"a": 1.5})
    store.count_hits("disk", 32)
    store.count_computed(16)
    fill(store, chain(2))
    store.close()
    store = open_store(home)
    assert store.constant("rate") == {"a": 1.5}
    assert store.constant("nothing", 7) == 7
    assert store.tokens_24h() == {"disk": 32, "computed": 16}
    status = store.status()
    assert status.written_today_bytes == 2 * SLOT_BYTES
    assert status.used_bytes == allocated(home)
    [slab] = status.slabs
    assert (slab.model, slab.num_blocks, slab.is_open) == ("model", 2, False)
    store.close()


@pytest.mark.parametrize("master_key", [None, MASTER_KEY], ids=["plain", "encrypted"])
def test_a_run_is_written_with_its_block_and_dies_with_it(home: Path, master_key: bytes | None) -> None:
    blocks = chain(3)
    ids = [987654321, 123456789, 55555]
    store = open_store(home, master_key=master_key)
    tier = store.tier_for(FINGERPRINT, PAYLOAD_BYTES, "model", "sha")
    fill_open(tier, blocks[:2])
    store.put_run(FINGERPRINT, b"r" * 16, blocks[2].name, ids)
    assert store.find_run(b"r" * 16) is None, "nothing of an answer is written before its last block"
    above = tier.copies()[1]
    assert tier.store(blocks[2].record, above, memoryview(blocks[2].image), "", False)
    assert tier.flush(30)
    assert store.find_run(b"r" * 16) == tuple(ids)
    store.close()
    store = open_store(home, master_key=master_key)
    assert store.runs() == [(b"r" * 16, tuple(ids))]
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert (packed in all_bytes(home)) == (master_key is None)
    store.forget_elsewhere(FINGERPRINT, {blocks[2].name}, set())
    assert store.find_run(b"r" * 16) is None
    assert packed not in all_bytes(home)
    store.close()
