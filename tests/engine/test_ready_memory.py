"""Pages that are there before they are written."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chatkv.engine import ready_memory
from chatkv.engine.ready_memory import ReadyMemory

NUM_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_memory, "READY_BYTES", 16 << 20)
    monkeypatch.setattr(ready_memory, "PIECE_BYTES", 4 << 20)


def new_memory() -> Tensor:
    """Shared memory: its mapping never merges with others, so that its pages can be counted."""
    return torch.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=torch.uint8)


def resident_bytes(memory: Tensor) -> int:
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found = start <= memory.data_ptr() < end
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("it is mapped nowhere")


def reached(ready: ReadyMemory, offset: int) -> None:
    """And what that began is done."""
    ready.reach(offset)
    if ready._thread is not None:
        ready._thread.join()


def test_some_way_ahead_of_use_memory_is_ready_and_no_more() -> None:
    memory = new_memory()
    ready = ReadyMemory(memory)
    reached(ready, 0)
    if resident_bytes(memory) == 0:
        pytest.skip("this kernel does not populate pages on request (Linux 5.14)")
    reached(ready, 7 << 20)
    assert resident_bytes(memory) == 16 << 20
    memory[9 << 20] = 5
    reached(ready, 9 << 20)
    assert resident_bytes(memory) == 32 << 20
    assert memory[9 << 20] == 5
    assert memory.count_nonzero() == 1


def test_use_that_jumps_ahead_finds_memory_ready_behind_it() -> None:
    memory = new_memory()
    ready = ReadyMemory(memory)
    reached(ready, 0)
    reached(ready, 30 << 20)
    assert ready._ready_bytes == (30 + 16) << 20
    reached(ready, 31 << 20)
    assert ready._ready_bytes == (30 + 16) << 20


def test_it_ends_with_the_memory() -> None:
    memory = new_memory()
    ready = ReadyMemory(memory)
    for offset in range(0, NUM_BYTES, 1 << 20):
        reached(ready, offset)
    assert resident_bytes(memory) == NUM_BYTES
    assert memory.count_nonzero() == 0


def test_beyond_a_limit_pages_come_when_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_memory, "MAX_READY_BYTES", 40 << 20)
    memory = new_memory()
    ready = ReadyMemory(memory)
    for offset in range(0, NUM_BYTES, 1 << 20):
        reached(ready, offset)
    assert resident_bytes(memory) <= 40 << 20
