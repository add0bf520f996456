"""The structs of `src/abi.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum, IntFlag

TILE = 16
KEY_TILE = 128
NUM_REGISTERS = 8
TILE_BYTES = {"int4-affine": 320, "int4": 288, "int8": 544}
"""Of a weight tile, by format."""


class Format(IntEnum):
    INT4_AFFINE = 0
    INT4 = 1
    INT8 = 2


class KvFormat(IntEnum):
    FP16 = 0
    INT8 = 1


class OpKind(IntEnum):
    EMBED = 0
    NORM_QUANTISE = 1
    QUANTISE = 2
    SILU_MUL_QUANTISE = 3
    LINEAR = 4
    LINEAR_ADD = 5
    ROPE_STORE = 6
    ATTENTION = 7
    SELECT = 8


class OpFlags(IntFlag):
    NONE = 0
    HAS_ROPE = 1
    OVER_SELECTED = 2
    FINE = 4


class Matrix(ctypes.Structure):
    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("num_rows", c_int32),
        ("num_columns", c_int32),
        ("format", c_int32),
        ("first_output", c_int32),
    )


class Activations(ctypes.Structure):
    _fields_ = (
        ("quanta", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("offsets", c_void_p),
        ("low", c_void_p),
    )


class Register(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64))


class Span(ctypes.Structure):
    _fields_ = (
        ("block_table", c_void_p),
        ("first_row", c_int32),
        ("num_rows", c_int32),
        ("start_position", c_int32),
        ("unused", c_int32),
    )


class Pool(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_bytes", c_int64),
        ("scales_offset", c_int64),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("format", c_int32),
    )


class Op(ctypes.Structure):
    _fields_ = (
        ("matrices", ctypes.POINTER(Matrix)),
        ("weight", c_void_p),
        ("kind", c_int32),
        ("source", c_int32),
        ("target", c_int32),
        ("num_matrices", c_int32),
        ("num_columns", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("flags", c_int32),
        ("eps", c_float),
        ("unused", c_int32),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.POINTER(Op)),
        ("token_ids", c_void_p),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("spans", ctypes.POINTER(Span)),
        ("selected", c_void_p),
        ("is_finite", c_void_p),
        ("op_ns", c_void_p),
        ("registers", Register * NUM_REGISTERS),
        ("activations", Activations),
        ("pool", Pool),
        ("num_ops", c_int32),
        ("num_rows", c_int32),
        ("num_spans", c_int32),
        ("num_selected", c_int32),
        ("num_heads", c_int32),
        ("scale", c_float),
    )


STRUCTS = (Matrix, Span, Op, Step)
"""In the order of `chatkv_struct_bytes`."""
