"""Random matrices of every format, and what a product with one is in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, Weight
from tests.kernels.triton.numbers import random

GROUP_SIZES = [32, 64, 128]


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(*shape: int, seed: int = 1) -> Tensor:
    """float32, from 0.005 to 0.055, of no pattern."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.005


def random_int4(
    num_rows: int, num_columns: int, group_size: int, has_minimums: bool = False, dtype: torch.dtype = torch.float16
) -> Int4Weight:
    shape = (num_rows, num_columns // group_size)
    scales = random_scales(*shape)
    minimums = (-7.5 * scales + 0.02 * random(*shape, seed=2)).to(dtype) if has_minimums else None
    return Int4Weight(random_bytes(*shape, group_size // 2), scales.to(dtype), minimums)


def random_int8(num_rows: int, num_columns: int, group_size: int, dtype: torch.dtype = torch.float16) -> Int8Weight:
    shape = (num_rows, num_columns // group_size)
    return Int8Weight(random_bytes(*shape, group_size).view(torch.int8), (random_scales(*shape) / 16).to(dtype))


def random_fp8(num_rows: int, num_columns: int) -> Fp8Weight:
    """Every finite byte is there, where there is room, normal and subnormal."""
    values = random_bytes(num_rows, num_columns)
    values[values & 0x7F == 0x7F] ^= 1
    return Fp8Weight(values, random_scales(num_rows) / 100)


def random_fp(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> FpWeight:
    return FpWeight(random(num_rows, num_columns, dtype=dtype))


def exact_product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """float64 [T, N]."""
    product = x.double() @ dequantise(weight).double().T
    return product if bias is None else product + bias.double()
