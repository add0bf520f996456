"""The records are the truth and the index a hint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_blocks import (
    SLOT_BYTES,
    chain,
    fill,
    names,
    open_store,
    stored_names,
    with_blocks,
)

from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES


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
