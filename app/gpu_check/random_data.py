"""Weights, pools and tables of random numbers, made where they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.triton.matrices import DeviceMatrix, to_device
from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, Weight

GROUP = 32


def int4_weight(num_rows: int, num_columns: int, device: torch.device) -> Int4Weight:
    groups = num_columns // GROUP
    quanta = torch.randint(0, 256, (num_rows, groups, GROUP // 2), dtype=torch.uint8, device=device)
    scales = (torch.rand(num_rows, groups, device=device) * 0.01).to(torch.float16)
    return Int4Weight(quanta, scales, -8 * scales)


def int8_weight(num_rows: int, num_columns: int, device: torch.device) -> Int8Weight:
    groups = num_columns // GROUP
    quanta = torch.randint(-127, 128, (num_rows, groups, GROUP), dtype=torch.int8, device=device)
    return Int8Weight(quanta, (torch.rand(num_rows, groups, device=device) * 0.001).to(torch.float16))


def fp8_weight(num_rows: int, num_columns: int, device: torch.device) -> Fp8Weight:
    """Every finite byte."""
    values = torch.randint(0, 254, (num_rows, num_columns), dtype=torch.uint8, device=device)
    values = torch.where(values == 127, 126, values).to(torch.uint8)
    return Fp8Weight(values, torch.full((num_rows,), 1e-4, device=device))


def fp_weight(num_rows: int, num_columns: int, device: torch.device) -> FpWeight:
    return FpWeight((torch.randn(num_rows, num_columns, device=device) * 0.02).to(torch.bfloat16))


def on_device(weight: Weight, device: torch.device, compute_dtype: torch.dtype) -> DeviceMatrix:
    return to_device([weight], None, device, compute_dtype)


def pool_of(layout: KVLayout, num_blocks: int, device: torch.device) -> tuple[Tensor, KVBlocks]:
    """uint8 [num_blocks, block_bytes] and its views; all numbers are random and finite."""
    pool = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=device)
    kv = layout.views(pool)
    for numbers in (kv.keys, kv.values):
        if numbers.dtype == torch.int8:
            numbers.copy_(torch.randint(-127, 128, numbers.shape, dtype=torch.int8, device=device))
        elif numbers.dtype == torch.uint8:
            numbers.copy_(torch.randint(0, 120, numbers.shape, dtype=torch.uint8, device=device))
        else:
            numbers.copy_(torch.randn(numbers.shape, device=device, dtype=numbers.dtype))
    for scales in (kv.key_scales, kv.value_scales):
        if scales is not None:
            scales.copy_(torch.rand(scales.shape, device=device) * 0.02 + 0.001)
    return pool, kv


def tables_of(num_sequences: int, num_tokens: int, device: torch.device) -> Tensor:
    """int32 [num_sequences, blocks]: all blocks of a pool, in random order."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    order = torch.randperm(num_sequences * num_blocks, device=device)
    return order.to(torch.int32).view(num_sequences, num_blocks)
