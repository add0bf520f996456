"""Products with every kind of matrix: which kernel computes one."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear_fp import fp_gemm, fp_matmul
from .linear_fp8 import fp8_gemm, fp8_gemv
from .linear_int4 import int4_gemm, int4_gemv
from .linear_int8 import int8_gemm, int8_gemv
from .linear_w8a8 import w8a8_gemm
from .matrices import DeviceMatrix, Fp8Matrix, FpMatrix, Int4Matrix, Int8Matrix, PlainMatrix, SideBySide

W8A8_FROM_ROWS = 32
"""Fewer rows wait for the weights, not for matrix units: rounding activations to fp8 would gain nothing."""


def linear(
    x: Tensor,
    matrix: DeviceMatrix,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    is_deterministic: bool = False,
    has_fp8_activations: bool = False,
) -> Tensor:
    """[T, K] -> [T, N]: x times the transposed matrix, plus its bias. Sums are float32.

    x: float16 or bfloat16; rows may have a stride, a multiple of 8 numbers. out: float16, bfloat16 or float32, the last
    dimension contiguous; made where None, of `out_dtype` or else of the type of x.
    is_deterministic: one kernel and one tile for all row counts, so that a row's bits depend on that row alone.
    has_fp8_activations: where there are many rows and the matrix is fp8, products are of fp8 numbers (from sm_89 on).
    """
    num_rows, (num_outputs, num_columns) = len(x), matrix.shape
    assert x.dtype in (torch.float16, torch.bfloat16), f"activations are {x.dtype}, not 16-bit floats"
    assert x.shape[1] == num_columns, f"{x.shape[1]} activations a row for {num_columns} columns"
    assert x.stride(1) == 1, "a row's activations must lie together"
    if out is None:
        out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    assert out.shape == (num_rows, num_outputs), f"out is {tuple(out.shape)}, not {(num_rows, num_outputs)}"
    assert out.stride(1) == 1, "a row's products must lie together"
    if num_rows == 0:
        return out
    first = 0
    for part in matrix.parts if isinstance(matrix, SideBySide) else (matrix,):
        end = first + part.shape[0]
        _multiply(x, part, out[:, first:end], is_deterministic, has_fp8_activations)
        first = end
    return out


def _multiply(x: Tensor, matrix: PlainMatrix, out: Tensor, is_deterministic: bool, has_fp8_activations: bool) -> Tensor:
    is_one_row = len(x) == 1 and not is_deterministic
    match matrix:
        case Int4Matrix() if is_one_row:
            return int4_gemv(x, matrix, out)
        case Int4Matrix():
            return int4_gemm(x, matrix, out, is_deterministic=is_deterministic)
        case Int8Matrix() if is_one_row:
            return int8_gemv(x, matrix, out)
        case Int8Matrix():
            return int8_gemm(x, matrix, out, is_deterministic=is_deterministic)
        case Fp8Matrix() if is_one_row:
            return fp8_gemv(x, matrix, out)
        case Fp8Matrix() if has_fp8_activations and not is_deterministic and len(x) >= W8A8_FROM_ROWS:
            return w8a8_gemm(x, matrix, out)
        case Fp8Matrix():
            return fp8_gemm(x, matrix, out, is_deterministic=is_deterministic)
        case FpMatrix() if is_deterministic or out.dtype != x.dtype:
            return fp_gemm(x, matrix, out)
        case FpMatrix():
            return fp_matmul(x, matrix, out)
