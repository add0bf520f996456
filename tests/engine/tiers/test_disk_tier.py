"""The disk tier: what is accepted, what comes to be safe, what goes."""

from __future__ import annotations

import errno
import os
import resource
import threading

import pytest
from disk_fixtures import FINGERPRINT, Disk
from tier_blocks import IMAGE_BYTES, WAIT_S, chain, image, load_all, record, store_chain

from chatkv.engine.errors import EngineError, OwnersGoneError
from chatkv.engine.store import space
from chatkv.engine.tiers import disk_tier
from chatkv.engine.tiers.disk_state import NUM_READ_FAILURES
from chatkv.engine.tiers.tier import CopyState

SLOT_BYTES = 4096 + IMAGE_BYTES


def damage(disk: Disk, wanted: bytes) -> None:
    """Turns one bit in every file that holds these bytes."""
    for path in disk.folder.rglob("*.slab"):
        content = bytearray(path.read_bytes())
        at = content.find(wanted)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))


def test_a_chain_is_queued_then_stored_then_comes_back(disk: Disk) -> None:
    tier = disk.open()
    records = chain(20)
    copies = store_chain(tier, records)
    assert {copy.state for copy in copies} == {CopyState.QUEUED}
    assert tier.stats().num_queued == 20
    assert list(tier.poll()) == []
    assert tier.flush(WAIT_S)
    assert list(tier.poll()) == copies
    assert {copy.state for copy in copies} == {CopyState.STORED}
    assert disk.load(copies[3:]) == [bytes(image(one)) for one in records[3:]]
    stats = tier.stats()
    assert (stats.num_blocks, stats.num_queued, stats.num_stored, stats.num_loaded) == (20, 0, 20, 17)
    assert stats.used_bytes == disk.used_bytes
    assert stats.notice is None


def test_b5_all_is_there_again_after_the_tier_was_opened_anew(disk: Disk) -> None:
    disk.open()
    records = chain(20)
    hit = disk.save(records)[:5]
    disk.tier.touch(hit * 9)
    copies = disk.open().copies()
    assert [copy.record for copy in copies] == records
    assert [copy.parent for copy in copies] == [None, *copies[:-1]]
    assert copies[4].hits > 5 * copies[5].hits
    assert disk.load(copies) == [bytes(image(one)) for one in records]
    child = record(20, 0, records[-1])
    (stored,) = [disk.tier.store(child, copies[-1], image(child), list, False)]
    assert disk.tier.flush(WAIT_S)
    assert stored is not None
    assert stored.state is CopyState.STORED


def test_d3_each_block_is_written_once(disk: Disk) -> None:
    disk.open()
    disk.save(chain(50))
    written = disk.files.num_written_bytes
    assert written >= 50 * SLOT_BYTES
    assert written < 51 * SLOT_BYTES + 64 * 1024
    disk.open()
    disk.load(disk.tier.copies())
    disk.close()
    assert disk.files.num_written_bytes - written < 64 * 1024


def test_a_full_queue_refuses_and_never_waits_for_the_disk(disk: Disk) -> None:
    tier = disk.open(queue_blocks=4)
    disk.files.hold("write")
    first = store_chain(tier, chain(4, 1))
    disk.changes.wait_for(lambda: "write" in disk.files.waiting)
    second = store_chain(tier, chain(4, 2))
    assert len(first) == 4
    assert second == []
    assert tier.stats().num_skipped == 1
    # Nothing that the engine calls waits for the writer.
    tier.touch(first)
    tier.pin(first, True)
    tier.pin(first, False)
    tier.remove(first[3:], is_forgotten=True)
    assert tier.start_load(first, WAIT_S).is_done
    assert list(tier.poll()) == []
    assert not tier.flush(0.05)
    disk.files.release_all()
    assert tier.flush(WAIT_S)
    assert tier.copies() == first[:3]
    assert len(disk.save(chain(4, 2))) == 4


def test_c8_the_image_is_the_one_of_the_moment_of_the_call(disk: Disk) -> None:
    tier = disk.open()
    block = bytearray(image(record(0)))
    copy = tier.store(record(0), None, memoryview(block), list, False)
    assert copy is not None
    block[:] = bytes(len(block))
    assert tier.flush(WAIT_S)
    assert disk.load([copy]) == [bytes(image(record(0)))]


def test_the_read_rate_is_known_after_the_first_group_and_kept(disk: Disk) -> None:
    tier = disk.open(image_bytes=64 * 1024)
    assert tier.stats().read_bytes_per_s == 0
    disk.save(chain(20))
    disk.changes.wait_for(lambda: tier.stats().read_bytes_per_s > 0)
    disk.close()
    assert disk.open(image_bytes=64 * 1024).stats().read_bytes_per_s > 0


def test_a_group_is_written_when_its_first_block_is_a_second_old(disk: Disk) -> None:
    tier = disk.open()
    (copy,) = store_chain(tier, chain(1))
    disk.up_s += 0.9
    assert copy.state is CopyState.QUEUED
    disk.up_s += 0.1
    disk.changes.wait_for(lambda: copy.state is CopyState.STORED)


def test_a_child_of_what_is_gone_is_refused(disk: Disk) -> None:
    tier = disk.open()
    copies = store_chain(tier, chain(2))
    tier.remove(copies[:1], is_forgotten=False)
    child = record(2, 0, copies[1].record)
    assert tier.store(child, copies[1], image(child), list, False) is None
    assert tier.store(record(0, 3), None, image(record(0, 3)), list, False) is not None


def test_owners_are_told_before_a_block_is_visible(disk: Disk) -> None:
    disk.open()
    mine, nobodys = chain(3, 1), chain(2, 2)
    store_chain(disk.tier, mine, "a")
    disk.save(nobodys)
    assert disk.owned == [("a", one.block_hash) for one in mine]


def test_owners_are_those_of_the_moment_when_a_block_becomes_safe(disk: Disk) -> None:
    tier = disk.open()
    owners = {"a"}
    block = record(0)
    assert tier.store(block, None, image(block), lambda: owners, False)
    owners |= {"b"}
    assert tier.flush(WAIT_S)
    assert disk.owned == [("a", block.block_hash), ("b", block.block_hash)]


# -- faults


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_c6_a_failed_write_is_never_visible_and_passes(disk: Disk, operation: str, number: int) -> None:
    tier = disk.open()
    before = disk.save(chain(3, 1))
    disk.files.errors[operation] = number
    failed = store_chain(tier, chain(3, 2))
    tier.poll()
    is_erased = tier.flush(0.2)
    assert is_erased == ((operation, number) == ("write", errno.ENOSPC)), "a full disk still makes holes"
    assert {copy.state for copy in failed} == {CopyState.GONE}
    assert set(tier.poll()) == set(failed)
    assert tier.stats().notice
    assert tier.copies() == before
    disk.files.errors.clear()
    disk.pass_back_off()
    assert len(disk.save(chain(3, 2))) == 3
    assert tier.stats().notice is None
    assert len(disk.open().copies()) == 6


def test_a_faulty_disk_is_left_alone_for_a_while(disk: Disk) -> None:
    tier = disk.open()
    disk.files.errors["write"] = errno.EIO
    store_chain(tier, chain(1, 1))
    assert not tier.flush(0.2)
    disk.files.errors.clear()
    (waiting,) = store_chain(tier, chain(1, 2))
    disk.up_s += 0.99
    disk.changes.wait_for(lambda: True)
    assert waiting.state is CopyState.QUEUED
    disk.up_s += 0.02
    disk.changes.wait_for(lambda: waiting.state is CopyState.STORED)


def test_c6_a_group_whose_owners_cannot_be_kept_is_dropped(disk: Disk) -> None:
    tier = disk.open()
    disk.on_owned_error = RuntimeError("the chat database is locked")
    copies = store_chain(tier, chain(2), "chat")
    assert tier.flush(WAIT_S)
    assert {copy.state for copy in copies} == {CopyState.GONE}
    assert "locked" in (tier.stats().notice or "")
    assert not disk.contains(bytes(image(copies[0].record)))
    assert disk.open().copies() == []


def test_a_chat_that_is_deleted_while_its_blocks_are_written_is_no_fault_of_the_disk(disk: Disk) -> None:
    tier = disk.open()
    disk.on_owned_error = OwnersGoneError("1 chat is gone")
    copies = store_chain(tier, chain(2), "chat")
    assert tier.flush(WAIT_S)
    assert {copy.state for copy in copies} == {CopyState.GONE}
    assert not disk.contains(bytes(image(copies[0].record)))
    assert tier.stats().notice is None
    disk.on_owned_error = None
    assert [copy.state for copy in disk.save(chain(2))] == [CopyState.STORED] * 2, "there was a back-off"


@pytest.mark.parametrize("position", [0, 4, 9])
def test_c5_a_damaged_record_is_a_miss_and_goes_with_all_below_it(disk: Disk, position: int) -> None:
    disk.open()
    records = chain(10)
    copies = disk.save(records)
    disk.tier.poll()
    damage(disk, bytes(image(records[position])))
    assert disk.load(copies) == [bytes(image(one)) for one in records[:position]]
    disk.changes.wait_for(lambda: copies[position].state is CopyState.GONE)
    assert set(disk.tier.poll()) == set(copies[position:])
    assert disk.tier.stats().num_damaged == 1
    assert [copy.state for copy in copies[:position]] == [CopyState.STORED] * position
    assert disk.tier.flush(WAIT_S)
    assert [copy.record for copy in disk.open().copies()] == records[:position]


def test_c5_a_truncated_file_is_a_miss(disk: Disk) -> None:
    disk.open()
    copies = disk.save(chain(6))
    (path,) = disk.folder.rglob("*.slab")
    os.truncate(path, path.stat().st_size - SLOT_BYTES // 2)
    assert len(disk.load(copies)) == 5
    disk.changes.wait_for(lambda: copies[5].state is CopyState.GONE)


def test_an_error_that_passes_destroys_nothing_one_that_stays_does(disk: Disk) -> None:
    disk.open()
    copies = disk.save(chain(3))
    disk.files.errors["read"] = errno.EIO
    for _ in range(NUM_READ_FAILURES - 1):
        assert disk.load(copies[:1]) == []
    disk.files.errors.clear()
    assert len(disk.load(copies)) == 3
    disk.files.errors["read"] = errno.EIO
    disk.load(copies[:1])
    disk.changes.wait_for(lambda: copies[2].state is CopyState.GONE)
    assert disk.tier.stats().num_damaged == 0


def test_c5_a_hung_read_blocks_neither_other_loads_nor_stores_nor_closing(disk: Disk) -> None:
    tier = disk.open()
    copies = disk.save(chain(4))
    gate = disk.files.hold("read")
    job = tier.start_load(copies, 0.05)
    assert load_all(job, disk.changes) == []
    del disk.files.gates["read"]
    assert len(disk.load(copies)) == 4
    assert len(disk.save(chain(3, 2))) == 3
    threads = [thread for thread in threading.enumerate() if thread.name == "chatkv-disk-read"]
    gate.set()
    disk.changes.wait_for(lambda: sum(thread.is_alive() for thread in threads) <= 3)
    assert job.take() == []


@pytest.mark.parametrize("operation", ["read", "sync"])
def test_c5_a_disk_that_hangs_while_its_tier_is_closed_can_be_used_again_when_it_answers(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(disk_tier, "CLOSE_S", 0.05)
    monkeypatch.setattr(space, "HANG_S", 0.05)
    tier = disk.open()
    copies = disk.save(chain(2))
    gate = disk.files.hold(operation)
    job = tier.start_load(copies, WAIT_S)
    store_chain(tier, chain(2, 2))
    tier.flush(0.0)
    disk.changes.wait_for(lambda: operation in disk.files.waiting)
    tier.close()

    def reopened() -> bool:
        try:
            disk.store.tier_for(FINGERPRINT, IMAGE_BYTES, "tiny", "0" * 64)
        except EngineError:
            return False
        return True

    assert not reopened()
    gate.set()
    disk.changes.wait_for(reopened)
    job.cancel()


def test_a_cancelled_load_gives_nothing_and_the_copies_can_be_evicted(disk: Disk) -> None:
    tier = disk.open()
    copies = disk.save(chain(4))
    gate = disk.files.hold("read")
    job = tier.start_load(copies, WAIT_S)
    disk.changes.wait_for(lambda: "read" in disk.files.waiting)
    job.cancel()
    assert {copy.num_readers for copy in copies} == {0}
    gate.set()
    assert job.is_done
    assert job.take() == []


# -- forget


def test_a_forgotten_chain_leaves_nothing_in_any_file(disk: Disk) -> None:
    tier = disk.open()
    kept = disk.save(chain(3, 1))
    copies = disk.save(chain(8, 2), "chat")
    assert disk.contains(copies[5].record.packed_ids)
    tier.remove(copies[:1], is_forgotten=True)
    assert {copy.state for copy in copies} == {CopyState.GONE}
    assert tier.flush(WAIT_S)
    for copy in copies:
        assert not disk.contains(copy.record.packed_ids)
        assert not disk.contains(copy.record.block_hash)
        assert not disk.contains(bytes(image(copy.record)[:64]))
    assert tier.copies() == kept


def test_forgotten_in_the_queue_it_is_never_written(disk: Disk) -> None:
    tier = disk.open()
    copies = store_chain(tier, chain(4))
    tier.remove(copies[1:2], is_forgotten=True)
    assert tier.flush(WAIT_S)
    assert [copy.state for copy in copies] == [CopyState.STORED, *[CopyState.GONE] * 3]
    assert disk.files.num_written_bytes < 2 * SLOT_BYTES + 64 * 1024
    assert not disk.contains(bytes(image(copies[2].record)[:64]))
    assert list(tier.poll()) == copies[:1]


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_forgotten_while_it_is_written_it_is_erased_after(disk: Disk, operation: str) -> None:
    tier = disk.open()
    gate = disk.files.hold(operation)
    copies = store_chain(tier, chain(4))
    flushed = threading.Thread(target=tier.flush, args=(WAIT_S,))
    flushed.start()
    disk.changes.wait_for(lambda: operation in disk.files.waiting)
    tier.remove(copies[2:], is_forgotten=True)
    gate.set()
    flushed.join()
    assert tier.flush(WAIT_S)
    assert [copy.state for copy in copies] == [*[CopyState.STORED] * 2, *[CopyState.GONE] * 2]
    for copy in copies[2:]:
        assert not disk.contains(copy.record.packed_ids)
        assert not disk.contains(bytes(image(copy.record)[:64]))
    assert [copy.record for copy in disk.open().copies()] == [copy.record for copy in copies[:2]]


def test_clearing_takes_everything(disk: Disk) -> None:
    tier = disk.open()
    stored = disk.save(chain(4, 1), is_pinned=True)
    queued = store_chain(tier, chain(4, 2))
    tier.poll()
    tier.drop_all()
    assert set(tier.poll()) == {*stored, *queued}
    assert tier.stats().num_blocks == tier.stats().num_queued == 0
    assert not disk.contains(bytes(image(stored[0].record)[:64]))
    assert disk.open().copies() == []


def test_what_a_check_found_damaged_goes_with_all_below(disk: Disk) -> None:
    tier = disk.open()
    copies = disk.save(chain(4))
    tier.discard_slots({copies[2].slot})
    assert [copy.state for copy in copies] == [*[CopyState.STORED] * 2, *[CopyState.GONE] * 2]
    assert tier.stats().num_damaged == 1


def test_d2_memory_does_not_grow_over_500_requests(disk: Disk) -> None:
    tier = disk.open(queue_blocks=16, quota_bytes=4 << 20)
    for number in range(20):
        disk.load(disk.save(chain(4, number)))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(20, 520):
        disk.load(disk.save(chain(4, number)))
        tier.poll()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8192
    assert tier.stats().num_evicted > 1000
