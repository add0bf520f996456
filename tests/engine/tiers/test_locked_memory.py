"""Pages are locked ahead of their use, and the memory holds what is written whether they are or not."""

from __future__ import annotations

import threading

import pytest
from tier_blocks import IMAGE_BYTES, Changes, chain, image, load_all, store_chain

from chatkv.engine.tiers import locked_memory
from chatkv.engine.tiers.host_tier import HostTier
from chatkv.engine.tiers.locked_memory import LockedMemory

MIB = 1 << 20


class FakeLocker:
    def __init__(self, refuses_from: int = 1 << 62) -> None:
        self.locked: dict[int, int] = {}
        self.num_asked = 0
        self._refuses_from = refuses_from
        self._is_done = threading.Condition()

    def lock(self, address: int, num_bytes: int) -> None:
        with self._is_done:
            self.num_asked += 1
            self._is_done.notify_all()
            if self.num_asked > self._refuses_from:
                raise RuntimeError("CUDA error: out of memory")
            self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def wait_for(self, num_asked: int) -> None:
        with self._is_done:
            assert self._is_done.wait_for(lambda: self.num_asked >= num_asked, 10)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory, "PIECE_BYTES", MIB)


def reach(memory: LockedMemory, offset: int) -> None:
    """Once the last piece is locked."""
    if memory._thread is not None:
        memory._thread.join()
    memory.reach(offset)
    memory._thread.join()  # type: ignore[union-attr]


def test_the_next_piece_is_locked_when_half_of_the_last_is_used() -> None:
    locker = FakeLocker()
    memory = LockedMemory(3 * MIB + 4096, 4096, locker)
    reach(memory, 0)
    assert memory.locked_bytes == MIB
    reach(memory, MIB // 2 - 4096)
    assert memory.locked_bytes == MIB, "what no chat needs yet is left alone"
    reach(memory, MIB // 2)
    assert memory.locked_bytes == 2 * MIB
    for offset in (MIB, 2 * MIB, 3 * MIB, 3 * MIB):
        reach(memory, offset)
    start = memory.bytes.data_ptr()
    assert locker.locked == {start: MIB, start + MIB: MIB, start + 2 * MIB: MIB, start + 3 * MIB: 4096}
    assert memory.locked_bytes == 3 * MIB + 4096
    memory.close()
    assert not locker.locked


def test_what_is_copied_at_once_lies_within_one_piece() -> None:
    locker = FakeLocker()
    memory = LockedMemory(5 * 3 * MIB // 2, 3 * MIB // 2, locker)
    for offset in range(0, 5 * 3 * MIB // 2, 3 * MIB // 2):
        reach(memory, offset)
    assert set(locker.locked.values()) == {3 * MIB // 2}
    assert all((address - memory.bytes.data_ptr()) % (3 * MIB // 2) == 0 for address in locker.locked)
    memory.close()


def test_a_system_that_refuses_is_not_asked_again() -> None:
    locker = FakeLocker(refuses_from=1)
    memory = LockedMemory(4 * MIB, 4096, locker)
    for offset in (0, MIB, 2 * MIB, 3 * MIB):
        reach(memory, offset)
    assert (locker.num_asked, memory.locked_bytes) == (2, MIB)
    memory.bytes.fill_(7)
    memory.close()
    assert not locker.locked


def test_a_host_tier_locks_as_it_fills_and_unlocks_when_it_closes() -> None:
    num_images = 2 * MIB // IMAGE_BYTES
    locker = FakeLocker()
    tier = HostTier(IMAGE_BYTES, 2 * num_images * IMAGE_BYTES, locker=locker)
    records = chain(num_images)
    copies = store_chain(tier, records)
    locker.wait_for(2)
    assert load_all(tier.start_load(copies, 1.0), Changes()) == [bytes(image(one)) for one in records]
    tier.close()
    assert not locker.locked
