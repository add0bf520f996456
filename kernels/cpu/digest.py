"""A digest of what this machine computes: equal where stored K and V have the bits that would be computed here.

Which bits a product or an exponential has depends on the instruction set and on the library that uses it. Instead of
listing all that they depend on, fixed numbers go through each kind of operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from .. import reference
from .tiles import KEY_TILE, TileProducts, combine

NUM_ROWS = 4
DIGEST_BYTES = 8


def fixed_numbers(*shape: int) -> Tensor:
    """float32 in -1 .. 1, made of whole numbers, so that they are the same everywhere."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1) * 2654435761 % (1 << 20)).float().div_(1 << 19).sub_(1).view(shape)


def arithmetic_digest(
    linears: Iterable[tuple[Callable[[Tensor], Tensor], int]], products: TileProducts, head_dim: int
) -> str:
    """Hexadecimal. linears: functions [T, num_columns] -> [T, n] as the model runs them, and their num_columns."""
    digest = blake2b(digest_size=DIGEST_BYTES)

    def add(numbers: Tensor) -> None:
        digest.update(numbers.contiguous().view(-1).view(torch.uint8).numpy().data)

    for linear, num_columns in linears:
        add(linear(fixed_numbers(NUM_ROWS, num_columns)))
    rows = fixed_numbers(NUM_ROWS, 2 * KEY_TILE) * 8
    add(reference.rms_norm(rows, rows[0], 1e-5))
    add(reference.silu_mul(rows))
    angles = rows * 1000
    add(angles.cos())
    add(angles.sin())
    queries = products.pad_rows(fixed_numbers(2, 1, NUM_ROWS, head_dim))
    keys, values = fixed_numbers(2, 2, 1, KEY_TILE, head_dim)
    attended = products.attend(queries, keys, values, None, 0)
    add(combine(attended, torch.zeros(2, dtype=torch.int64), [1, 1]))
    return digest.hexdigest()
