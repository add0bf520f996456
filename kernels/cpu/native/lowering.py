"""A program as the operations of `abi.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...program import (
    Attend,
    Embed,
    Gate,
    Linear,
    Norm,
    Program,
    ProgramOp,
    RotateAndStore,
    Select,
    Take,
)
from ...weights import (
    GROUP_SIZE,
    BnbInt8Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nf4Weight,
    TiledWeight,
    Weight,
)
from .abi import TILE, Format, Matrix, Op, OpFlags, OpKind

FORMATS = {"int4-affine": Format.INT4_AFFINE, "int4": Format.INT4, "int8": Format.INT8}

HEAD_MULTIPLE = TILE
"""Head sizes are multiples of it."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    ops: ctypes.Array[Op]
    num_layer_ops: int
    """Operations before the one that selects rows."""
    kept: Sequence[Any]
    """What `ops` points into."""

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    def ops_from(self, index: int) -> Any:
        """A pointer to one of `ops`."""
        return ctypes.cast(ctypes.byref(self.ops, index * ctypes.sizeof(Op)), ctypes.POINTER(Op))


def why_unsuitable(program: Program) -> str | None:
    """Why native kernels cannot run `program`, for people; None: they can."""
    matrices = program.matrices
    if any(isinstance(weight, Int4Weight | Int8Weight) for weight in matrices):
        return f"native kernels need groups of {GROUP_SIZE} weights with a 16-bit scale, this model has others"
    if any(isinstance(weight, Fp8Weight | Nf4Weight | BnbInt8Weight) for weight in matrices):
        return 'native kernels read int8 and int4, not these weights: weight_format = "int8" is many times as fast'
    are_packed = [isinstance(weight, TiledWeight) for weight in matrices]
    if not any(are_packed):
        return 'native kernels need weights of 4 or 8 bits: weight_format = "int8" makes them, for many times the speed'
    if not all(are_packed):
        return "native kernels need weights of 4 or 8 bits throughout, and some of this model's are larger"
    if program.head_dim % HEAD_MULTIPLE:
        return f"native kernels need a head size that {HEAD_MULTIPLE} divides, this model's is {program.head_dim}"
    return None


def lower(program: Program) -> LoweredProgram:
    """`why_unsuitable` must have found nothing."""
    kept: list[Any] = []
    ops = [_lowered(op, program, kept) for op in program.ops]
    _flag_fine(program.ops, ops)
    (select,) = (index for index, op in enumerate(program.ops) if isinstance(op, Select))
    for op in ops[select + 1 :]:
        op.flags |= OpFlags.OVER_SELECTED
    return LoweredProgram((Op * len(ops))(*ops), select, kept)


def _flag_fine(ops: Sequence[ProgramOp], lowered: Sequence[Op]) -> None:
    """Those that write fine activations, and those that read them."""
    are_fine = False
    for op, struct in zip(ops, lowered, strict=True):
        if isinstance(op, Norm | Take | Gate):
            are_fine = isinstance(op, Norm) and op.is_fine
        if are_fine and isinstance(op, Norm | Linear):
            struct.flags |= OpFlags.FINE


def _lowered(op: ProgramOp, program: Program, kept: list[Any]) -> Op:
    def pointer(numbers: Tensor) -> int:
        assert numbers.is_contiguous()
        kept.append(numbers)
        return numbers.data_ptr()

    match op:
        case Embed(target, table):
            return Op(kind=OpKind.EMBED, target=target, matrices=_matrices([table], None, kept), num_matrices=1)
        case Norm(source, weight, eps):
            width = program.width(source)
            return Op(kind=OpKind.NORM_QUANTISE, source=source, weight=pointer(weight), eps=eps, num_columns=width)
        case Take(source):
            return Op(kind=OpKind.QUANTISE, source=source, num_columns=program.width(source))
        case Gate(source):
            return Op(kind=OpKind.SILU_MUL_QUANTISE, source=source, num_columns=program.width(source) // 2)
        case Linear(target, weights, bias, is_added):
            kind = OpKind.LINEAR_ADD if is_added else OpKind.LINEAR
            matrices = _matrices(weights, bias, kept)
            width = weights[0].shape[1]
            return Op(kind=kind, target=target, matrices=matrices, num_matrices=len(weights), num_columns=width)
        case RotateAndStore(heads, layer, norm, eps, has_rope):
            flags = OpFlags.HAS_ROPE if has_rope else OpFlags.NONE
            weights_pointer = None if norm is None else pointer(norm)
            return Op(kind=OpKind.ROPE_STORE, source=heads, weight=weights_pointer, eps=eps, layer=layer, flags=flags)
        case Attend(heads, target, layer, window):
            return Op(kind=OpKind.ATTENTION, source=heads, target=target, layer=layer, window=window or 0)
        case Select(source, target):
            return Op(kind=OpKind.SELECT, source=source, target=target, num_columns=program.width(source))


def _matrices(weights: Sequence[Weight], bias: Tensor | None, kept: list[Any]) -> Any:
    """A ctypes array: the matrices' rows side by side in the target."""
    array = (Matrix * len(weights))()
    first = 0
    for matrix, weight in zip(array, weights, strict=True):
        assert isinstance(weight, TiledWeight)
        assert weight.tiles.is_contiguous()
        matrix.tiles = weight.tiles.data_ptr()
        matrix.bias = None if bias is None else bias.data_ptr() + first * bias.itemsize
        matrix.num_rows, matrix.num_columns = weight.shape
        matrix.format = FORMATS[weight.format]
        matrix.first_output = first
        first += weight.num_rows
    kept += [array, weights, bias]
    return ctypes.cast(array, ctypes.POINTER(Matrix))
