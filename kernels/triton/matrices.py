"""Weight matrices as they lie on the device, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from ..tile_layout import untile
from ..weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, TiledWeight, Weight

BLOCK_COLUMNS = 32
"""Columns whose int4 quanta lie in 4 neighbouring words."""


@dataclass(frozen=True, slots=True)
class FpMatrix:
    """`values`: [N, K] float16 or bfloat16. `bias`: float32 [N] or None, as in all kinds."""

    values: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """value = quantum * scale. `quanta`: [N, K] int8; `scales`: [N, K / group_size] float16 or float32."""

    quanta: Tensor
    scales: Tensor
    group_size: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.quanta.shape[0], self.quanta.shape[1]


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """value = scale * quantum + minimum, or scale * (quantum - 8) where `minimums` is None.

    `words`: [N, K / 8] int32. The 4 words of a block of 32 columns hold, in word w, column 8 j + 2 w at bit 4 j and
    column 8 j + 2 w + 1 at bit 16 + 4 j (j, w < 4): one shift and one mask give two neighbouring columns as the two
    halves of a word, which are two 16-bit floats once their exponents are set. `scales`, `minimums`:
    [N, K / group_size] float16 or float32.
    """

    words: Tensor
    scales: Tensor
    minimums: Tensor | None
    group_size: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 8


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """value = number * scale. `values`: [N, K] uint8, bytes of e4m3fn; `scales`: float32 [N]."""

    values: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Matrices of several formats, whose products lie side by side."""

    parts: tuple[PlainMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


PlainMatrix: TypeAlias = FpMatrix | Int8Matrix | Int4Matrix | Fp8Matrix
DeviceMatrix: TypeAlias = PlainMatrix | SideBySide


def to_device(
    weights: Sequence[Weight], bias: Tensor | None, device: torch.device | str, compute_dtype: torch.dtype
) -> DeviceMatrix:
    """Matrices [N_i, K] stacked into one [sum N_i, K]; bias float32 [sum N_i].

    Neighbours of one format become one matrix, other formats stay side by side. Float weights are rounded to
    `compute_dtype`, packed ones keep every number. Raises ValueError when their columns differ.
    """
    plain = [untile(weight) if isinstance(weight, TiledWeight) else weight for weight in weights]
    if len({weight.shape[1] for weight in plain}) != 1:
        raise ValueError(f"matrices with other numbers of columns cannot be stacked: {[w.shape for w in plain]}")
    parts: list[PlainMatrix] = []
    first = 0
    for _, run in groupby(plain, _format):
        alike = list(run)
        end = first + sum(weight.shape[0] for weight in alike)
        part_bias = None if bias is None else bias[first:end].to(device=device, dtype=torch.float32)
        parts.append(_stacked(alike, part_bias, torch.device(device), compute_dtype))
        first = end
    return parts[0] if len(parts) == 1 else SideBySide(tuple(parts))


def num_bytes(matrix: DeviceMatrix) -> int:
    """What it takes on the device."""
    if isinstance(matrix, SideBySide):
        return sum(map(num_bytes, matrix.parts))
    tensors = (getattr(matrix, name) for name in matrix.__dataclass_fields__)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def int4_words(quanta: Tensor) -> Tensor:
    """uint8 [N, num_groups, group_size / 2] of an Int4Weight -> int32 [N, K / 8] of an Int4Matrix."""
    columns = torch.cat((quanta & 0x0F, quanta >> 4), dim=-1)
    columns = columns.reshape(len(quanta), -1, 4, 4, 2)  # [N, block, j, word, half]
    pairs = columns[:, :, 0::2] | columns[:, :, 1::2] << 4
    in_order = pairs.permute(0, 1, 3, 4, 2).contiguous()  # [N, block, word, half, j / 2]: the bytes of a word last
    return in_order.flatten(3).view(torch.int32).flatten(1)


def _format(weight: Weight) -> tuple[object, ...]:
    match weight:
        case Int8Weight(_, scales):
            return Int8Weight, weight.group_size, scales.dtype
        case Int4Weight(_, scales, minimums):
            return Int4Weight, weight.group_size, scales.dtype, minimums is None
        case _:
            return (type(weight),)


def _stacked(
    weights: Sequence[Weight], bias: Tensor | None, device: torch.device, compute_dtype: torch.dtype
) -> PlainMatrix:
    """Weights of one format. Each is moved before they are put together, so that the host needs no second copy."""

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        moved = [tensor.to(device) for tensor in tensors]
        return torch.cat(moved) if len(moved) > 1 else moved[0].clone(memory_format=torch.contiguous_format)

    match weights[0]:
        case Int8Weight():
            int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
            quanta = stack([weight.quanta.flatten(1) for weight in int8])
            return Int8Matrix(quanta, stack([weight.scales for weight in int8]), int8[0].group_size, bias)
        case Int4Weight():
            int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
            words = stack([int4_words(weight.quanta.to(device)) for weight in int4])
            minimums = [weight.minimums for weight in int4 if weight.minimums is not None]
            stacked_minimums = stack(minimums) if minimums else None
            scales = stack([weight.scales for weight in int4])
            return Int4Matrix(words, scales, stacked_minimums, int4[0].group_size, bias)
        case Fp8Weight():
            fp8 = [weight for weight in weights if isinstance(weight, Fp8Weight)]
            return Fp8Matrix(stack([weight.values for weight in fp8]), stack([weight.scales for weight in fp8]), bias)
        case _:
            fp = [weight for weight in weights if isinstance(weight, FpWeight)]
            return FpMatrix(stack([weight.values.to(compute_dtype) for weight in fp]), bias)
