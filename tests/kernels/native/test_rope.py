"""Native norm and rotation of queries and keys, and where K and V are stored."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chatkv.kernels.reference import rms_norm, rope
from chatkv.kernels.reference_attention import kv_write
from tests.kernels.native.native_pool import NativePool, rope_store
from tests.kernels.native.one_op import other_variants, same_bits

DTYPES = (torch.float16, torch.int8)
NUM_HEADS, NUM_KV_HEADS = 6, 2
SLOTS = [16, 17, -1, 0, 79, 33, 34, -1, 63, 1]


def heads_of(head_dim: int, num_rows: int = len(SLOTS), seed: int = 0) -> Tensor:
    shape = (num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def angles_of(head_dim: int, num_rows: int = len(SLOTS)) -> tuple[Tensor, Tensor]:
    angles = torch.rand(num_rows, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 7
    return angles.cos(), angles.sin()


def new_pool(head_dim: int, dtype: torch.dtype) -> NativePool:
    return NativePool(5, 3, NUM_KV_HEADS, head_dim, dtype)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_rope", [False, True])
def test_queries_and_keys_agree_with_the_reference(head_dim: int, has_norm: bool, has_rope: bool) -> None:
    heads, angles = heads_of(head_dim), angles_of(head_dim)
    weight = torch.rand(NUM_HEADS + NUM_KV_HEADS, head_dim, generator=torch.Generator().manual_seed(2)) + 0.5
    stored = rope_store(
        heads,
        new_pool(head_dim, torch.float16),
        SLOTS,
        scale=0.125,
        angles=angles if has_rope else None,
        weight=weight if has_norm else None,
        eps=1e-5,
    )
    expected = heads.clone()
    rotated = expected[:, : NUM_HEADS + NUM_KV_HEADS]
    if has_norm:
        rotated = rms_norm(rotated, weight, 1e-5)
    if has_rope:
        rotated = rope(rotated, *angles)
    expected[:, : NUM_HEADS + NUM_KV_HEADS] = rotated
    expected[:, :NUM_HEADS] *= 0.125
    torch.testing.assert_close(stored, expected, rtol=1e-6, atol=2e-6)
    assert torch.equal(stored[:, NUM_HEADS + NUM_KV_HEADS :], heads[:, NUM_HEADS + NUM_KV_HEADS :])


def test_rotation_rounds_one_product_and_the_sum() -> None:
    """In float64 a product of two floats is exact, so a sum rounded to float is the one of an fma."""
    heads, (cos, sin) = heads_of(64), angles_of(64)
    stored = rope_store(heads, new_pool(64, torch.float16), SLOTS, angles=(cos, sin))
    a, b = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = (a.double() * cos.double() - (b * sin).double()).float()
    second = (b.double() * cos.double() + (a * sin).double()).float()
    num_rotated = NUM_HEADS + NUM_KV_HEADS
    assert torch.equal(stored[:, :num_rotated], torch.cat((first, second), dim=-1)[:, :num_rotated])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
@pytest.mark.parametrize("layer", [0, 2])
def test_keys_and_values_are_stored_as_the_reference_stores_them(dtype: torch.dtype, head_dim: int, layer: int) -> None:
    """And nothing else is touched: neither negative slots, nor other layers, nor what is between blocks."""
    heads = heads_of(head_dim)
    heads[0, -1] = 0
    heads[3, -4] = 0
    heads[4, -2] *= 1e-39
    heads[5, -1] = torch.arange(head_dim) - head_dim / 2 + 0.5
    heads[5, -1, 0] = 127
    heads[6] *= 1e-6  # subnormal halves
    heads[8, -3] *= 1e4  # some overflow
    pool, expected = new_pool(head_dim, dtype), new_pool(head_dim, dtype)
    stored = rope_store(heads, pool, SLOTS, layer, angles=angles_of(head_dim))
    keys, values = stored[:, NUM_HEADS:].chunk(2, dim=1)
    kv_write(expected.blocks, layer, keys, values, torch.tensor(SLOTS))
    assert torch.equal(pool.data, expected.data)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_int8_of_numbers_that_are_not_finite_has_a_scale_of_nan(number: float) -> None:
    heads = heads_of(32, 1)
    heads[0, NUM_HEADS, 5] = number
    heads[0, -1, 31] = number
    pool = new_pool(32, torch.int8)
    rope_store(heads, pool, [20])
    blocks = pool.blocks
    assert blocks.key_scales is not None
    assert blocks.value_scales is not None
    assert blocks.key_scales[1, 0, :, 4].isnan().tolist() == [True, False]
    assert blocks.value_scales[1, 0, :, 4].isnan().tolist() == [False, True]
    assert not blocks.keys[1, 0, 0, 4].any()
    assert not blocks.values[1, 0, 1, 4].any()


def test_halves_keep_numbers_that_are_not_finite() -> None:
    heads = heads_of(32, 1)
    heads[0, NUM_HEADS, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    pool = new_pool(32, torch.float16)
    rope_store(heads, pool, [20])
    keys = pool.blocks.keys[1, 0, 0, 4, :3]
    assert bool(keys[0].isnan())
    assert keys[1:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
def test_variants_give_the_bits_of_scalar(dtype: torch.dtype, head_dim: int) -> None:
    heads, angles = heads_of(head_dim), angles_of(head_dim)
    heads[1, 2, 3] = heads[1, NUM_HEADS, 4] = math.nan
    heads[3, NUM_HEADS + 1, 0] = math.inf
    weight = heads_of(head_dim, 1, seed=3)[0, : NUM_HEADS + NUM_KV_HEADS].contiguous()

    def run(variant: str, num_threads: int = 1) -> tuple[Tensor, NativePool]:
        pool = new_pool(head_dim, dtype)
        rows = rope_store(heads, pool, SLOTS, 1, 0.3, angles, weight, 1e-6, variant, num_threads)
        return rows, pool

    rows, pool = run("scalar")
    for other_rows, other_pool in (*map(run, other_variants()), run("scalar", 4)):
        assert same_bits(other_rows, rows)
        for mine, others in zip(parts_of(pool), parts_of(other_pool), strict=True):
            assert same_bits(mine.float(), others.float())


def parts_of(pool: NativePool) -> list[Tensor]:
    blocks = pool.blocks
    parts = (blocks.keys, blocks.values, blocks.key_scales, blocks.value_scales)
    return [part for part in parts if part is not None]
