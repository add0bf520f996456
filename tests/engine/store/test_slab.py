"""Records in slots: what was written comes back, what was erased does not, and the order in which that happens."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from store_blocks import (
    SLOT_BYTES,
    SlabBench,
    all_bytes,
    chain,
    churn,
    marked_pieces,
    names,
    read,
    reopened,
)

from chatkv.engine.store.cipher import Cipher
from chatkv.engine.store.record import MAX_EXTRA_BYTES, BadRecordError
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES
from chatkv.engine.tiers.tier import CopyState


@pytest.fixture(params=[None, Cipher(b"m" * 32)], ids=["plain", "encrypted"])
def cipher(request: pytest.FixtureRequest) -> Cipher | None:
    return request.param


@pytest.fixture
def bench(folder: Path, cipher: Cipher | None) -> SlabBench:
    return SlabBench(folder, cipher)


def test_blocks_come_back_as_they_were_stored_also_after_a_restart(bench: SlabBench) -> None:
    blocks = [*chain(5, seed=1, extra=b"salt"), *chain(3, seed=2)]
    slots = bench.save(blocks)
    assert [read(bench.slab, slot) for slot in slots] == blocks
    again = reopened(bench)
    assert again.copies.keys() == names(blocks)
    for block in blocks:
        copy = again.copies[block.name]
        assert copy.record == block.record
        assert copy.state is CopyState.STORED
        assert (copy.hits, copy.hit_at_s) == (1.0, 100.0)
        assert read(again.slab, copy.slot, copy.record) == block
    assert again.slab.num_free == 0


def test_copies_come_parents_first_and_know_their_children(bench: SlabBench) -> None:
    stem = chain(3, seed=1)
    branch = chain(2, seed=2, parent=stem[1])
    bench.save([*stem, *branch])
    again = reopened(bench)
    seen = set()
    for copy in again.copies.values():
        assert copy.parent is None or copy.parent.record.block_hash in seen
        seen.add(copy.record.block_hash)
    assert again.copies[branch[0].name].parent is again.copies[stem[1].name]
    assert [again.copies[block.name].num_children for block in stem] == [1, 2, 0]


def test_nothing_is_visible_before_its_commit(bench: SlabBench) -> None:
    [block] = chain(1)
    bench.slab.write(bench.slab.take_slot(), block.record, memoryview(block.image))
    bench.slab.sync()
    again = reopened(bench)
    assert not again.copies
    assert again.slab.num_slots == 0
    again.close()
    assert block.image[:64] not in all_bytes(bench.path.parent)


def test_another_block_in_the_slot_is_refused(bench: SlabBench) -> None:
    first, second = chain(2)
    slot, _ = bench.save([first, second])
    for wrong in (
        second.record,
        first.record._replace(packed_ids=bytes(64)),
        first.record._replace(parent_hash=b"x" * 16),
        first.record._replace(position=9),
        first.record._replace(extra=b"x"),
    ):
        with pytest.raises(BadRecordError):
            read(bench.slab, slot, wrong)


def test_erased_slots_are_reused_at_no_cost_and_before_the_file_grows(bench: SlabBench) -> None:
    blocks = chain(4)
    slots = bench.save(blocks)
    bench.slab.erase(slots[1:3])
    assert [bench.slab.new_bytes(slot) for slot in slots[1:3]] == [0, 0]
    with pytest.raises(BadRecordError):
        read(bench.slab, slots[1])
    others = chain(3, seed=9)
    assert bench.save(others) == [slots[1], slots[2], 4]
    assert read(bench.slab, slots[1]) == others[0]


def test_slots_that_still_have_their_range_are_taken_before_holes(bench: SlabBench) -> None:
    slots = bench.save(chain(6))
    bench.slab.erase([slots[1]], is_punched=True)
    bench.slab.erase([slots[3]])
    assert [bench.slab.take_slot() for _ in range(3)] == [3, 1, 6]
    assert bench.slab.new_bytes(1) > SLOT_BYTES


def test_the_tail_of_the_file_is_given_back(bench: SlabBench) -> None:
    slots = bench.save(chain(6))
    bench.slab.erase(slots[2:4], is_punched=True)
    assert bench.slab.num_slots == 6
    bench.slab.erase(slots[4:], is_punched=True)
    assert bench.slab.num_slots == 2
    assert bench.path.stat().st_size == SLAB_HEADER_BYTES + 2 * SLOT_BYTES


def test_what_a_slot_may_allocate_is_known_before(any_folder: Path) -> None:
    bench = SlabBench(any_folder)
    random = Random(1)
    held: list[int] = []
    for seed in range(60):
        blocks = chain(random.randrange(1, 6), seed=seed)
        slots = [bench.slab.take_slot() for _ in blocks]
        bound = bench.slab.allocated_bytes + sum(map(bench.slab.new_bytes, slots))
        for slot, block in zip(slots, blocks, strict=True):
            bench.slab.write(slot, block.record, memoryview(block.image))
        bench.slab.sync()
        assert bench.slab.allocated_bytes <= bound
        bench.slab.commit([(slot, block.record, 1.0, 1.0) for slot, block in zip(slots, blocks, strict=True)])
        held += slots
        gone = [held.pop(random.randrange(len(held))) for _ in range(random.randrange(min(5, len(held))))]
        bench.slab.erase(gone, is_punched=random.random() < 0.5)
    bench.close()


def test_an_extra_that_does_not_fit_is_refused(bench: SlabBench) -> None:
    [block] = chain(1, extra=bytes(MAX_EXTRA_BYTES + 1))
    with pytest.raises(ValueError, match="extra"):
        bench.slab.write(bench.slab.take_slot(), block.record, memoryview(block.image))


def test_hits_are_kept(bench: SlabBench) -> None:
    [block] = chain(1)
    [slot] = bench.save([block])
    bench.slab.set_hits([(slot, 7.5, 123.0), (99, 1.0, 1.0)])
    copy = reopened(bench).copies[block.name]
    assert (copy.hits, copy.hit_at_s) == (7.5, 123.0)


def test_of_forgotten_blocks_nothing_is_in_any_file(bench: SlabBench) -> None:
    kept, gone, evicted = chain(3, seed=1), chain(4, seed=2, extra=b"secret salt of theirs"), chain(2, seed=3)
    evicted_slots = bench.save(evicted)
    bench.save(kept)
    slots = bench.save(gone)
    bench.slab.erase(evicted_slots)
    assert evicted[0].image[:64] in all_bytes(bench.path.parent) or bench.cipher
    bench.slab.erase(slots, is_forgotten=True)
    left = all_bytes(bench.path.parent)
    for block in gone:
        assert block.record.packed_ids not in left
        assert block.record.extra not in left
        assert block.name not in left
        assert block.image[:64] not in left
    for block in evicted:
        assert block.image[:64] not in left
    if bench.cipher is None:
        assert kept[0].image in left
        assert left.count(kept[0].record.packed_ids) == 2, "the search finds what is there"


def test_what_was_stored_before_a_restart_is_reused_at_no_cost_and_forgotten_as_well(bench: SlabBench) -> None:
    evicted, gone = chain(2, seed=1), chain(3, seed=2)
    evicted_slots, gone_slots = bench.save(evicted), bench.save(gone)
    again = reopened(bench)
    again.slab.erase(evicted_slots)
    assert [again.slab.new_bytes(slot) for slot in evicted_slots] == [0, 0]
    again.slab.erase(gone_slots[1:], is_forgotten=True)
    left = all_bytes(again.path)
    assert all(block.image[:64] not in left for block in [*evicted, *gone[1:]])
    assert again.slab.new_bytes(evicted_slots[0]) > SLOT_BYTES


def test_forgetting_reaches_what_earlier_deletes_have_left_in_the_index(folder: Path) -> None:
    bench = SlabBench(folder)
    held, gone = churn(bench.index, bench.slab.id)
    bench.index.database.checkpoint()
    assert marked_pieces(folder) & gone, "this test needs a page whose gap holds a piece of a row"
    bench.slab.erase((), is_forgotten=True)
    assert marked_pieces(folder) == held


def test_encrypted_blocks_show_neither_ids_nor_images(folder: Path) -> None:
    bench = SlabBench(folder, Cipher(b"m" * 32))
    blocks = chain(5, extra=b"a salt in the clear")
    bench.save(blocks)
    bench.index.database.checkpoint()
    left = all_bytes(folder)
    for block in blocks:
        assert block.name in left
        assert block.record.packed_ids[:16] not in left
        assert block.record.extra not in left
        assert block.image[:32] not in left
    bench.close()
    other = SlabBench(folder, Cipher(b"n" * 32))
    assert not other.copies, "another master key reads nothing"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_blocks_without_their_parent_are_swept(folder: Path, keep: int) -> None:
    """The file ends early, so that rows point behind it; what is below a missing block goes too."""
    bench = SlabBench(folder)
    blocks = chain(4)
    bench.save([blocks[2], blocks[0], blocks[1], blocks[3]])
    bench.close()
    with bench.path.open("r+b") as file:
        file.truncate(SLAB_HEADER_BYTES + keep * SLOT_BYTES)
    again = SlabBench(folder)
    assert again.copies.keys() == names({1: [], 2: blocks[:1], 3: blocks[:3]}[keep])
    assert again.index.num_blocks(again.slab.id) == len(again.copies)
    assert blocks[3].record.packed_ids not in again.path.read_bytes()


def test_two_records_of_one_block_are_reduced_to_one(folder: Path) -> None:
    bench = SlabBench(folder)
    blocks = chain(2)
    bench.save([*blocks, blocks[1]])
    again = reopened(bench)
    assert again.copies.keys() == names(blocks)
    assert again.path.read_bytes().count(blocks[1].record.packed_ids) == 1
