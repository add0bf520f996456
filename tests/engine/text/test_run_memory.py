"""Answers of stateless clients that outlive the process."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.engine.text.run_memory import RunMemory

KEY = b"k" * 32


class Kept:
    """A store of runs."""

    def __init__(self) -> None:
        self.runs: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}

    def find(self, key: bytes) -> Sequence[int] | None:
        return self.runs[key][1] if key in self.runs else None

    def put(self, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        self.runs[key] = (block_hash, tuple(token_ids))


def find(memory: RunMemory, prompt: Sequence[int], text: str) -> tuple[int, ...] | None:
    chain = memory.chain()
    chain.extend(prompt)
    return memory.find(chain.run_key((), text))


def test_a7_an_answer_is_found_after_a_restart_as_long_as_its_block_is_kept() -> None:
    kept = Kept()
    RunMemory(key=KEY, kept=kept).remember((1, 2, 3), "hello", (7, 8), b"b" * 16)
    assert [block_hash for block_hash, _ in kept.runs.values()] == [b"b" * 16]
    later = RunMemory(key=KEY, kept=kept)
    assert find(later, (1, 2, 3), "hello") == (7, 8)
    assert find(later, (1, 2, 4), "hello") is None
    kept.runs.clear()
    later.clear()
    assert find(later, (1, 2, 3), "hello") is None


def test_another_key_finds_nothing() -> None:
    kept = Kept()
    RunMemory(key=KEY, kept=kept).remember((1, 2, 3), "hello", (7, 8), b"b" * 16)
    assert find(RunMemory(key=b"o" * 32, kept=kept), (1, 2, 3), "hello") is None


def test_an_answer_without_a_full_block_is_remembered_by_this_process_only() -> None:
    kept = Kept()
    memory = RunMemory(key=KEY, kept=kept)
    memory.remember((1,), "hello", (7,))
    assert find(memory, (1,), "hello") == (7,)
    assert kept.runs == {}


def test_what_is_found_again_counts_and_is_bounded() -> None:
    kept = Kept()
    first = RunMemory(key=KEY, kept=kept)
    for number in range(4):
        first.remember((number,), "hello", (number,) * 10, b"b" * 16)
    memory = RunMemory(max_tokens=25, key=KEY, kept=kept)
    for number in range(4):
        assert find(memory, (number,), "hello") == (number,) * 10
        assert memory.num_tokens <= 25
