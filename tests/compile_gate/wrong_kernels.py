"""Kernels that the gate must refuse, and one that it must not: `python -m tests.compile_gate.wrong_kernels` prints what
is said of each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cards import CARDS
from .compile_only import compile_only
from .report import refusals, row_of


@triton.jit
def changes_its_type_kernel(numbers):
    total = 0
    for index in range(0, 4):
        total = total + tl.load(numbers + index)
    tl.store(numbers, total)


@triton.jit
def holds_too_much_kernel(numbers, size: tl.constexpr):
    places = tl.arange(0, size)
    held = tl.load(numbers + places)
    for _ in range(0, 3):
        held += tl.sum(held * held, axis=0)
    tl.store(numbers + places, held)


@triton.jit
def shares_too_much_kernel(numbers, num_steps, size: tl.constexpr):
    """Four tiles of each factor are on their way at once."""
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    places = rows * size + columns
    total = tl.zeros((size, size), tl.float32)
    for step in range(0, num_steps):
        left = tl.load(numbers + step * size * size + places)
        right = tl.load(numbers + (num_steps - step) * size * size + places)
        total = tl.dot(left, right, total)
    tl.store(numbers + places, total.to(tl.float16))


@triton.jit
def copy_kernel(numbers):
    places = tl.arange(0, 64)
    tl.store(numbers + places, tl.load(numbers + places))


def main() -> None:
    card = CARDS["sm_86"]
    with compile_only(card) as seen:
        changes_its_type_kernel[(1,)](torch.zeros(4))
        holds_too_much_kernel[(1,)](torch.zeros(65536), 65536, num_warps=4)
        squares = torch.zeros(2, 128, 128, dtype=torch.float16)
        shares_too_much_kernel[(1,)](squares, 1000, 128, num_warps=8, num_stages=4)
        copy_kernel[(1,)](torch.zeros(64))
    for compiled in seen.compiled:
        said = " ".join(refusal.reason for refusal in refusals(card, [row_of("", compiled, with_counts=False)]))
        words = [word for word in ("error", "spills", "memory") if word in said.lower()]
        print(words[0] if words else "good")


if __name__ == "__main__":
    main()
