"""A program as the launches that run it, its weights on the device.

A product that is added to the hidden numbers stays in the compute dtype beside them: whatever reads them next adds it
on the way. So a layer reads and writes the hidden numbers twice, not four times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..executor import OnProgress
from ..program import Attend, Embed, Gate, Linear, Norm, Program, Register, RotateAndStore, Select, Take
from ..weights import Weight
from .bnb_matrix import BnbMatrix, bnb_matrix
from .matrices import DeviceMatrix, Fp8Matrix, SideBySide, num_bytes, to_device

AnyMatrix: TypeAlias = DeviceMatrix | BnbMatrix


@dataclass(frozen=True, slots=True)
class EmbedRows:
    target: Register
    table: AnyMatrix


@dataclass(frozen=True, slots=True)
class NormRows:
    """activations = rms_norm(source + what is to be added to it)."""

    source: Register
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Multiply:
    target: Register
    matrix: AnyMatrix
    is_added: bool


@dataclass(frozen=True, slots=True)
class Rotate:
    heads: Register
    layer: int
    norm: Tensor | None
    eps: float
    has_rope: bool


Launch: TypeAlias = EmbedRows | NormRows | Take | Gate | Multiply | Rotate | Attend | Select


class Lowering:
    """Each weight is copied once, also one that is table and head at the same time."""

    def __init__(self, program: Program, device: torch.device, compute_dtype: torch.dtype) -> None:
        self._program = program
        self._device = device
        self._compute_dtype = compute_dtype
        self._matrices: dict[tuple[int, ...], AnyMatrix] = {}

    def launches(self, on_progress: OnProgress | None = None) -> Iterator[Launch]:
        num_ops = len(self._program.ops)
        for done, op in enumerate(self._program.ops):
            match op:
                case Embed(target, table):
                    yield EmbedRows(target, self._matrix((table,), None))
                case Norm(source, weight, eps):
                    yield NormRows(source, self._vector(weight), eps)
                case Linear(target, weights, bias, is_added):
                    yield Multiply(target, self._matrix(weights, bias), is_added)
                case RotateAndStore(heads, layer, norm, eps, has_rope):
                    yield Rotate(heads, layer, None if norm is None else self._vector(norm), eps, has_rope)
                case Take() | Gate() | Attend() | Select():
                    yield op
            if on_progress:
                on_progress((done + 1) / num_ops)

    @property
    def weight_bytes(self) -> int:
        return sum(
            matrix.num_bytes if isinstance(matrix, BnbMatrix) else num_bytes(matrix)
            for matrix in self._matrices.values()
        )

    @property
    def has_fp8_weights(self) -> bool:
        return any(
            isinstance(part, Fp8Matrix)
            for matrix in self._matrices.values()
            for part in (matrix.parts if isinstance(matrix, SideBySide) else (matrix,))
        )

    def _matrix(self, weights: tuple[Weight, ...], bias: Tensor | None) -> AnyMatrix:
        key = (*map(id, weights), id(bias))
        if key not in self._matrices:
            matrix = bnb_matrix(weights, bias, self._device)
            self._matrices[key] = matrix or to_device(weights, bias, self._device, self._compute_dtype)
        return self._matrices[key]

    def _vector(self, vector: Tensor) -> Tensor:
        return vector.to(self._device, torch.float32).contiguous()
