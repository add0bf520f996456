"""The patched interpreter computes as torch does, and notices what a GPU would not forgive."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = [torch.float16, torch.bfloat16, torch.float32]
FP8_KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, num_columns: tl.constexpr):
    columns = tl.arange(0, num_columns)
    x = tl.load(x_ptr + columns)
    y = tl.load(y_ptr + columns)
    tl.store(out_ptr + columns, x + y)
    tl.store(out_ptr + num_columns + columns, x * y)
    tl.store(out_ptr + 2 * num_columns + columns, tl.where(x < y, x, y))
    tl.store(out_ptr + 3 * num_columns + columns, -x)
    tl.store(out_ptr + 4 * num_columns + columns, tl.maximum(x, y))
    tl.store(out_ptr + 5 * num_columns + columns, tl.max(x, axis=0))
    tl.store(out_ptr + 6 * num_columns + columns, x.to(tl.int32).to(x.dtype))


@triton.jit
def sum_kernel(x_ptr, out_ptr, num_columns: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, num_columns)), axis=0))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    index = tl.arange(0, 16)
    places = index[:, None] * 16 + index[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places)))


@triton.jit
def cast_kernel(x_ptr, out_ptr, back_ptr, num_columns, dtype: tl.constexpr, width: tl.constexpr):
    columns = tl.arange(0, width)
    is_inside = columns < num_columns
    cast = tl.load(x_ptr + columns, mask=is_inside).to(dtype)
    tl.store(out_ptr + columns, cast, mask=is_inside)
    tl.store(back_ptr + columns, cast.to(tl.float32), mask=is_inside)


@triton.jit
def spread_mask_kernel(x_ptr, out_ptr, width: tl.constexpr):
    places = tl.arange(0, width)
    first = tl.load(x_ptr)
    is_wanted = (places < 5) & (first > 0)
    tl.store(out_ptr + places, 1.0, mask=is_wanted)


@triton.jit
def copy_kernel(x_ptr, out_ptr, num_columns, shift: tl.constexpr, is_masked: tl.constexpr, width: tl.constexpr):
    columns = tl.program_id(0) * width + tl.arange(0, width)
    is_inside = columns < num_columns
    x = tl.load(x_ptr + columns + shift, mask=is_inside) if is_masked else tl.load(x_ptr + columns + shift)
    tl.store(out_ptr + columns, x, mask=is_inside)


@triton.jit
def overlapping_kernel(out_ptr, width: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, width), tl.program_id(0))


@triton.jit
def shifted_in_place_kernel(x_ptr, num_columns, width: tl.constexpr):
    columns = tl.program_id(0) * width + tl.arange(0, width)
    x = tl.load(x_ptr + columns + 1, mask=columns + 1 < num_columns, other=0.0)
    tl.store(x_ptr + columns, x, mask=columns < num_columns)


@triton.jit
def scale_over_byte_kernel(bytes_ptr, scales_ptr):
    """Program 0 stores a float over the bytes that the others store one by one."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(scales_ptr, 1.0)
    else:
        tl.store(bytes_ptr + program, 1)


@triton.jit
def lanes_kernel(out_ptr):
    lanes = tl.arange(0, 16)
    tl.store(out_ptr + lanes // 2, lanes)


@triton.jit
def add_kernel(out_ptr, place):
    tl.atomic_add(out_ptr + place, 1.0)


@triton.jit
def assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "positive")


@triton.jit
def hint_kernel(x_ptr, first, multiple: tl.constexpr, length: tl.constexpr, step: tl.constexpr):
    first = tl.multiple_of(first, multiple)
    places = tl.max_contiguous(first + tl.arange(0, 16) * step, length)
    tl.store(x_ptr + places, 0.0)


def numbers(count: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3).to(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_is_torchs(kind: torch.dtype) -> None:
    x, y = numbers(64, kind), numbers(64, kind, seed=1)
    out = torch.zeros(7, 64, dtype=kind)
    arithmetic_kernel[(1,)](x, y, out, 64)
    expected = [x + y, x * y, torch.minimum(x, y), -x, torch.maximum(x, y), x.max().expand(64), x.int().to(kind)]
    for got, right in zip(out, expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_of_numbers_not_of_bits(kind: torch.dtype) -> None:
    x, out = numbers(64, kind), torch.zeros(1, dtype=kind)
    sum_kernel[(1,)](x, out, 64)
    torch.testing.assert_close(out[0], x.double().sum().to(kind))


@pytest.mark.parametrize("kind", [*KINDS, *FP8_KINDS])
def test_dots_are_of_numbers_not_of_bits(kind: torch.dtype) -> None:
    a, b = numbers(256, torch.float32).to(kind).view(16, 16), numbers(256, torch.float32, 1).to(kind).view(16, 16)
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_casts_to_fp8_and_back_are_torchs(kind: torch.dtype) -> None:
    limit = torch.finfo(kind).max
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    x = torch.cat((every, torch.linspace(-limit, limit, 501), numbers(200, torch.float32) / 500, torch.tensor([1.95])))
    bits, back = torch.zeros(len(x), dtype=torch.uint8).view(kind), torch.zeros(len(x))
    cast_kernel[(1,)](x, bits, back, len(x), dtype=NAMES[kind], width=1024)
    expected = torch.where(x.isnan(), x, x.clamp(-limit, limit)).to(kind)
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits.float().nan_to_num(7), expected.float().nan_to_num(7))


def test_casts_to_bfloat16_round_to_even_and_keep_nan() -> None:
    x = torch.cat((numbers(500, torch.float32), torch.tensor([float("nan"), float("inf"), 1.00390625, 1.01171875])))
    out, back = torch.zeros(len(x), dtype=torch.bfloat16), torch.zeros(len(x))
    cast_kernel[(1,)](x, out, back, len(x), dtype=tl.bfloat16, width=512)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.bfloat16])
def test_a_mask_may_come_from_a_scalar_of_any_dtype(kind: torch.dtype, first: int) -> None:
    out = torch.zeros(8)
    spread_mask_kernel[(1,)](torch.tensor([first], dtype=kind), out, 8)
    assert out.sum() == 5 * first


def test_a_launch_in_bounds_passes() -> None:
    pool, out = torch.randn(100), torch.zeros(50)
    copy_kernel[(4,)](pool[10:60], out, 50, 0, True, 16)
    assert torch.equal(out, pool[10:60])


@pytest.mark.parametrize(("shift", "is_masked"), [(0, False), (1, True), (-1, True)])
def test_a_load_out_of_bounds_is_caught(shift: int, is_masked: bool) -> None:
    with pytest.raises(Exception, match="out-of-bounds load"):
        copy_kernel[(4,)](torch.randn(50), torch.zeros(50), 50, shift, is_masked, 16)


def test_a_load_inside_the_storage_but_outside_the_view_is_caught() -> None:
    with pytest.raises(Exception, match="out-of-bounds load"):
        copy_kernel[(4,)](torch.randn(100)[10:60], torch.zeros(50), 50, 1, True, 16)


def test_a_store_out_of_bounds_is_caught() -> None:
    with pytest.raises(Exception, match="out-of-bounds store"):
        overlapping_kernel[(1,)](torch.zeros(8, dtype=torch.int32), 16)


def test_an_atomic_out_of_bounds_is_caught() -> None:
    total = torch.zeros(1)
    add_kernel[(8,)](total, 0)
    assert total.item() == 8
    with pytest.raises(Exception, match="out-of-bounds atomic"):
        add_kernel[(1,)](total, 1)


def test_two_programs_that_store_to_one_address_are_caught() -> None:
    with pytest.raises(Exception, match="store to one address"):
        overlapping_kernel[(2,)](torch.zeros(8, dtype=torch.int32), 8)


def test_a_program_that_loads_what_another_stores_is_caught() -> None:
    with pytest.raises(Exception, match="race: program"):
        shifted_in_place_kernel[(4,)](torch.randn(64), 64, 16)


def test_stores_of_different_widths_to_the_same_bytes_are_caught() -> None:
    pool = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(Exception, match="store to one address"):
        scale_over_byte_kernel[(3,)](pool, pool.view(torch.float32))


def test_lanes_that_store_different_numbers_to_one_address_are_caught() -> None:
    with pytest.raises(Exception, match="different numbers for one address"):
        lanes_kernel[(1,)](torch.zeros(8, dtype=torch.int32))


def test_device_asserts_count() -> None:
    assert_kernel[(1,)](torch.ones(1))
    with pytest.raises(Exception, match="positive"):
        assert_kernel[(1,)](-torch.ones(1))


def test_false_hints_are_caught() -> None:
    hint_kernel[(1,)](torch.ones(64), 16, multiple=16, length=16, step=1)
    with pytest.raises(Exception, match="not a multiple"):
        hint_kernel[(1,)](torch.ones(64), 24, multiple=16, length=16, step=1)
    with pytest.raises(Exception, match="no runs"):
        hint_kernel[(1,)](torch.ones(64), 0, multiple=16, length=4, step=2)
