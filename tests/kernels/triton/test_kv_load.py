"""What the pool holds reaches the matrix units exactly."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from chatkv.kernels.triton.kv_load import to_compute, value_unit
from chatkv.kernels.triton.runtime import TL_DTYPES
from tests.kernels.triton.numbers import COMPUTE_DTYPES


@triton.jit
def convert(stored, numbers, CDT: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(numbers + places, to_compute(tl.load(stored + places), CDT))


@pytest.mark.parametrize("compute", COMPUTE_DTYPES)
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_every_byte_is_exact(stored: torch.dtype, compute: torch.dtype) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    numbers = torch.empty(256, dtype=compute)
    convert[(1,)](every_byte.view(stored), numbers, TL_DTYPES[compute], 256)
    expected = every_byte.view(torch.int8 if stored == torch.int8 else torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    found = numbers.float() * value_unit(stored, compute)
    assert torch.equal(found[is_number], expected[is_number])
