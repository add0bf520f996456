"""Conversions by bits are torch's, for every number that can occur."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from chatkv.kernels.reference import SMALLEST_SCALE
from chatkv.kernels.triton.bits import (
    e4m3_to_float16,
    float32_to_e4m3,
    float32_to_int8,
    magnitude_bits,
    scale_of,
)
from chatkv.kernels.triton.runtime import ceil_div, check_tensor, next_power_of_two
from tests.kernels.triton.numbers import random

E4M3 = torch.arange(256, dtype=torch.uint8)
IS_NUMBER = (E4M3 & 0x7F) != 0x7F


@triton.jit
def decode_kernel(bytes_ptr, out_ptr):
    places = tl.arange(0, 256)
    tl.store(out_ptr + places, e4m3_to_float16(tl.load(bytes_ptr + places)))


@triton.jit
def encode_kernel(numbers_ptr, e4m3_ptr, int8_ptr, count, width: tl.constexpr):
    places = tl.arange(0, width)
    is_inside = places < count
    numbers = tl.load(numbers_ptr + places, mask=is_inside, other=0.0)
    tl.store(e4m3_ptr + places, float32_to_e4m3(numbers), mask=is_inside)
    tl.store(int8_ptr + places, float32_to_int8(numbers), mask=is_inside)


@triton.jit
def scale_kernel(rows_ptr, out_ptr, num_rows: tl.constexpr, width: tl.constexpr):
    rows = tl.arange(0, num_rows)
    numbers = tl.load(rows_ptr + rows[:, None] * width + tl.arange(0, width)[None, :])
    tl.store(out_ptr + rows, scale_of(tl.max(magnitude_bits(numbers), axis=1), 127.0))


def test_every_byte_of_e4m3_is_decoded_exactly() -> None:
    out = torch.zeros(256, dtype=torch.float16)
    decode_kernel[(1,)](E4M3, out)
    expected = E4M3.view(torch.float8_e4m3fn).half()
    assert torch.equal(out[IS_NUMBER], expected[IS_NUMBER])
    assert out[~IS_NUMBER].abs().tolist() == [480, 480]


def test_every_number_is_encoded_to_the_nearest_e4m3_ties_to_even() -> None:
    numbers = E4M3.view(torch.float8_e4m3fn).float()[IS_NUMBER]
    ordered = numbers.sort().values
    ties = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat((ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9))))
    beyond = torch.tensor([449.0, 463.0, 465.0, 1e30, float("inf"), -449.0, -1e30, -float("inf"), 1e-30, -0.0, 1e-45])
    x = torch.cat((numbers, ties, near, beyond, random(1000) * 100, random(1000) / 200))
    e4m3, int8 = torch.zeros(len(x), dtype=torch.uint8), torch.zeros(len(x), dtype=torch.int8)
    encode_kernel[(1,)](x, e4m3, int8, len(x), width=next_power_of_two(len(x)))
    assert torch.equal(e4m3, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_int8_is_the_nearest_ties_to_even() -> None:
    x = torch.cat((torch.arange(-254, 255) / 2, torch.linspace(-127, 127, 1501)))
    e4m3, int8 = torch.zeros(len(x), dtype=torch.uint8), torch.zeros(len(x), dtype=torch.int8)
    encode_kernel[(1,)](x, e4m3, int8, len(x), width=next_power_of_two(len(x)))
    assert torch.equal(int8, x.round().to(torch.int8))


def test_scales_keep_what_is_not_finite() -> None:
    rows = random(8, 16)
    rows[1] = 0
    rows[2, 3], rows[3, 4], rows[4, 5] = float("nan"), float("inf"), -float("inf")
    rows[5] = -1e-44
    out = torch.zeros(8)
    scale_kernel[(1,)](rows, out, 8, 16)
    assert out[2].isnan()
    assert out[[3, 4]].tolist() == [float("inf")] * 2
    assert out[[1, 5]].tolist() == [SMALLEST_SCALE] * 2
    assert torch.equal(out[[0, 6, 7]], rows[[0, 6, 7]].abs().amax(-1) / 127)


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (576, 1024), (1024, 1024)])
def test_powers_of_two(number: int, power: int) -> None:
    assert next_power_of_two(number) == power
    assert ceil_div(power + 1, number) * number > power


def test_tensors_are_checked_in_plain_words() -> None:
    tensor = torch.zeros(2, 4)
    check_tensor("x", tensor, (2, 4), torch.float32)
    for other, message in ((tensor.half(), "x is torch.float16"), (tensor[1:], "not \\[2, 4\\]"), (tensor.T, "not")):
        with pytest.raises(AssertionError, match=message):
            check_tensor("x", other, (2, 4), torch.float32)
    with pytest.raises(AssertionError, match="not contiguous"):
        check_tensor("x", torch.zeros(4, 2).T, (2, 4), torch.float32)
