"""Triton's interpreter, made right for bfloat16 and fp8, faster, and strict about memory. Tests only.

As shipped it computes with the raw bits of bfloat16 and loses carries in casts to fp8. What is patched here is private
to triton: proven with 3.6 and 3.9. `memory_check` holds the bounds and race checks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as shipped

from tests.kernels.triton import memory_check

Array = np.ndarray
TensorHandle = shipped.TensorHandle
Builder = shipped.InterpreterBuilder

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
"""Kept as uint8 by the interpreter, as bfloat16 is kept as uint16."""
FP8_NUMBERS = {dtype: torch.arange(256, dtype=torch.uint8).view(kind).float().numpy() for dtype, kind in FP8.items()}


def is_kept_as_bits(dtype: Any) -> bool:
    return dtype.scalar == tl.bfloat16 or dtype.scalar in FP8


def to_numbers(data: Array, dtype: Any) -> Array:
    """What the interpreter keeps -> floats: float32 for bfloat16 and fp8, all else unchanged."""
    if dtype.scalar == tl.bfloat16:
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32).reshape(data.shape)
    if dtype.scalar in FP8:
        return FP8_NUMBERS[dtype.scalar][data]
    return data


def to_bits(numbers: Any, dtype: Any) -> Array:
    """Floats -> what the interpreter keeps: the nearest, ties to even; fp8 saturates, as GPUs convert."""
    if not is_kept_as_bits(dtype):
        return np.asarray(numbers).astype(shipped._get_np_dtype(dtype.scalar))
    numbers = torch.from_numpy(np.array(numbers, dtype=np.float32))
    if dtype.scalar == tl.bfloat16:
        return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    kind = FP8[dtype.scalar]
    limit = torch.finfo(kind).max
    return torch.where(numbers.isnan(), numbers, numbers.clamp(-limit, limit)).to(kind).view(torch.uint8).numpy()


def install() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(shipped, "is_patched_for_tests", False):
        return
    shipped.is_patched_for_tests = True
    _patch_arithmetic()
    _patch_reductions()
    _patch_language_once()
    # `tl.device_assert` is ignored otherwise.
    shipped.interpreter_builder.options = shipped.InterpreterOptions(debug=True, sanitize_overflow=False)
    memory_check.install()


def _patch_arithmetic() -> None:
    shipped_binary, shipped_unary, shipped_ternary = Builder.binary_op, Builder.unary_op, Builder.ternary_op
    shipped_cast, shipped_convert, shipped_dot = Builder.cast_impl, shipped._convert_float, Builder.create_dot
    shipped_fma = Builder.create_fma

    def convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if not (is_kept_as_bits(source) or is_kept_as_bits(target)):
            return shipped_convert(data, source, target, rounding)
        numbers = to_numbers(data, source)
        if rounding == shipped._ir.ROUNDING_MODE.RTZ and target.scalar == tl.bfloat16:
            return (np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        bits = to_bits(numbers, target)
        return bits.view(getattr(np, f"uint{target.scalar.primitive_bitwidth}")).reshape(data.shape)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != target.scalar and (is_kept_as_bits(source.dtype) or is_kept_as_bits(target)):
            return TensorHandle(to_bits(to_numbers(source.data, source.dtype), target), target.scalar)
        return shipped_cast(self, source, target)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if not is_kept_as_bits(left.dtype):
            result = shipped_binary(self, left, right, operation).data
            # As shipped, what a comparison gives is said to be of its operands' dtype, and no mask once it is spread.
            return TensorHandle(result, tl.int1 if result.dtype == np.bool_ else left.dtype.scalar)
        result = operation(to_numbers(left.data, left.dtype), to_numbers(right.data, right.dtype))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(to_bits(result, left.dtype), left.dtype.scalar)

    def unary(self: Any, operand: Any, operation: Any) -> Any:
        if not is_kept_as_bits(operand.dtype):
            return shipped_unary(self, operand, operation)
        return TensorHandle(to_bits(operation(to_numbers(operand.data, operand.dtype)), operand.dtype), operand.dtype)

    def ternary(self: Any, first: Any, second: Any, third: Any, operation: Any) -> Any:
        if operation is np.where or not is_kept_as_bits(third.dtype):
            return shipped_ternary(self, first, second, third, operation)
        result = operation(*(to_numbers(handle.data, handle.dtype) for handle in (first, second, third)))
        return TensorHandle(to_bits(result, third.dtype), third.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_kept_as_bits(z.dtype):
            return shipped_fma(self, x, y, z)
        x, y, addend = (to_numbers(handle.data, handle.dtype).astype(np.float64) for handle in (x, y, z))
        return TensorHandle(to_bits(x * y + addend, z.dtype), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # Products of 16-bit numbers are exact in float32, which matrix units add in; numpy's own half loop is slow.
        is_half = a.data.dtype == np.float16 and d.data.dtype == np.float32
        if not (is_half or is_kept_as_bits(a.dtype) or is_kept_as_bits(b.dtype)):
            return shipped_dot(self, a, b, d, *options)
        left, right = (np.asarray(to_numbers(handle.data, handle.dtype), np.float32) for handle in (a, b))
        return TensorHandle(to_bits(np.matmul(left, right) + to_numbers(d.data, d.dtype), d.dtype), d.dtype.scalar)

    shipped._convert_float = convert_float
    Builder.cast_impl, Builder.create_dot, Builder.create_fma = cast, dot, fma
    Builder.binary_op, Builder.unary_op, Builder.ternary_op = binary, unary, ternary
    # As GPUs do, and triton 3.9: the number where the other one is NaN.
    Builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    Builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    Builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)


def _patch_reductions() -> None:
    for name in ("sum", "min_max"):
        setattr(shipped.ReduceOps, name, _over_numbers(getattr(shipped.ReduceOps, name)))


def _over_numbers(shipped_reduce: Any) -> Any:
    def reduce(self: Any, rows: Any, *args: Any, **options: Any) -> Any:
        rows = rows[0] if isinstance(rows, tuple) else rows
        if not is_kept_as_bits(rows.dtype):
            return shipped_reduce(self, rows, *args, **options)
        numbers = TensorHandle(to_numbers(rows.handle.data, rows.dtype), tl.float32)
        wide = tl.core.tensor(numbers, tl.block_type(tl.float32, list(rows.shape)))
        result = shipped_reduce(self, wide, *args, **options)
        if isinstance(result, tuple):  # the extremum and its index
            return narrow(result[0], rows.dtype), result[1]
        return narrow(result, rows.dtype) if result.dtype == tl.float32 else result

    def narrow(result: Any, dtype: Any) -> Any:
        kind = tl.block_type(dtype, list(result.shape)) if result.shape else dtype
        return tl.core.tensor(TensorHandle(to_bits(result.handle.data, dtype), dtype), kind)

    return reduce


def _patch_language_once() -> None:
    """The interpreter patches `triton.language` again at every call of a device function, at 3 ms each. It stays
    patched here: nothing else uses the language in a process of tests."""
    shipped._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    for language in (tl, tl.core):
        language.multiple_of = memory_check.checked_multiple_of(language.multiple_of)
        language.max_contiguous = memory_check.checked_max_contiguous(language.max_contiguous)
    unpatched = SimpleNamespace(restore=lambda: None)
    shipped._patch_lang = lambda function: unpatched
