"""QK-norm, RoPE and the stores of K and V against their specifications, over every dtype and head size."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference_attention import kv_write
from chatkv.kernels.triton.rope import rotate_and_store
from tests.kernels.triton.numbers import (
    BLOCK_SIZE,
    COMPUTE_DTYPES,
    HEAD_SIZES,
    KV_DTYPES,
    TOLERANCES,
    assert_near,
    blocks_of,
    random,
    sparse_bytes,
    zero_blocks,
)

EPS = 1e-5
LAYER = 1
POSITIONS = [0, 1, 5, 31, 2]
SLOTS = [3, 17, 47, -1, 16]
"""The last position of the last block among them; one row is padding."""
SHAPES = [(6, 2), (9, 3), (4, 4), (8, 1)]


class Case(NamedTuple):
    heads: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    norm: Tensor | None
    num_heads: int
    num_kv_heads: int
    has_rope: bool

    def run(self, kv: KVBlocks) -> Tensor:
        heads = self.heads.clone()
        rotate_and_store(
            heads,
            self.positions,
            self.cos,
            self.sin,
            kv,
            LAYER,
            self.slots,
            self.num_heads,
            self.num_kv_heads,
            self.norm,
            EPS,
            self.has_rope,
        )
        return heads

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, K and V [T, heads, head_dim] in float64, not yet rounded or quantised."""
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.heads.double().unflatten(1, (num_rotated + self.num_kv_heads, -1))
        rotated = heads[:, :num_rotated]
        if self.norm is not None:
            rotated = reference.rms_norm(rotated, self.norm.double(), EPS)
        if self.has_rope:
            rotated = reference.rope(rotated, self.cos.double()[self.positions], self.sin.double()[self.positions])
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]


def case(
    dtype: torch.dtype,
    head_dim: int,
    shape: tuple[int, int] = (6, 2),
    num_rows: int = len(POSITIONS),
    has_norm: bool = False,
    has_rope: bool = True,
) -> Case:
    num_heads, num_kv_heads = shape
    angles = torch.arange(40).unsqueeze(1) * 100.0 ** (-torch.arange(head_dim // 2) / head_dim)
    return Case(
        heads=random(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype) * 2,
        positions=torch.tensor(POSITIONS[:num_rows], dtype=torch.int32),
        slots=torch.tensor(SLOTS[:num_rows], dtype=torch.int64),
        cos=angles.cos(),
        sin=angles.sin(),
        norm=1 + random(num_heads + num_kv_heads, head_dim, seed=1) / 4 if has_norm else None,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        has_rope=has_rope,
    )


def check(made: Case, kv_dtype: torch.dtype) -> None:
    head_dim = made.cos.shape[1] * 2
    kv = zero_blocks(kv_dtype, head_dim, num_kv_heads=made.num_kv_heads)
    heads = made.run(kv)
    queries, keys, values = made.expected()
    num_query_numbers = made.num_heads * head_dim
    assert_near(heads[:, :num_query_numbers], queries.flatten(1), made.heads.dtype)
    assert torch.equal(heads[:, num_query_numbers:], made.heads[:, num_query_numbers:])
    right = zero_blocks(kv_dtype, head_dim, num_kv_heads=made.num_kv_heads)
    kv_write(right, LAYER, keys.float(), values.float(), made.slots)
    # K comes through float32 sums whose last bits differ; V does not.
    assert torch.equal(kv.values, right.values)
    if kv.value_scales is not None and right.value_scales is not None:
        assert torch.equal(kv.value_scales, right.value_scales)
    assert_same_keys(kv, right)


def assert_same_keys(kv: KVBlocks, right: KVBlocks) -> None:
    """What is stored is within a last place of what is right, and the same but at ties; nothing else is touched."""
    steps = (last_places(kv.keys) - last_places(right.keys)).abs()
    is_tiny = (numbers_of(kv, "key") - numbers_of(right, "key")).abs() < 1e-6
    assert ((steps <= 1) | is_tiny).all()
    assert (steps != 0).sum() <= 0.02 * (right.keys != 0).sum()
    if kv.key_scales is not None and right.key_scales is not None:
        assert torch.equal(kv.key_scales != 0, right.key_scales != 0)
        torch.testing.assert_close(kv.key_scales, right.key_scales, rtol=1e-5, atol=0)


def last_places(stored: Tensor) -> Tensor:
    """Numbers as they follow each other: int8 itself, floats by their bits."""
    if stored.dtype == torch.int8:
        return stored.int()
    bits, sign = (stored.int(), 0x80) if stored.dtype == torch.uint8 else (stored.view(torch.int16).int(), 0x8000)
    return torch.where((bits & sign) != 0, -(bits & (sign - 1)), bits & (sign - 1))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_every_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, has_norm: bool) -> None:
    check(case(dtype, 64, has_norm=has_norm), kv_dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_every_head_size(head_dim: int, kv_dtype: torch.dtype) -> None:
    check(case(torch.float16, head_dim, has_norm=True), kv_dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("has_norm", "has_rope"), list(product([False, True], [False, True])))
def test_every_group(shape: tuple[int, int], has_norm: bool, has_rope: bool) -> None:
    check(case(torch.bfloat16, 80, shape, has_norm=has_norm, has_rope=has_rope), torch.bfloat16)


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_every_row_count(num_rows: int) -> None:
    made = case(torch.float16, 64, num_rows=num_rows)
    if num_rows:
        check(made, torch.uint8)
    else:
        made.run(zero_blocks(torch.uint8, 64))


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    made = case(torch.bfloat16, 96, has_norm=True)
    together, alone = zero_blocks(torch.int8, 96), zero_blocks(torch.int8, 96)
    heads = made.run(together)
    for row in range(len(POSITIONS)):
        one = made._replace(**{name: getattr(made, name)[row : row + 1] for name in ("heads", "positions", "slots")})
        assert torch.equal(one.run(alone)[0], heads[row])
    assert torch.equal(alone.keys, together.keys)
    assert torch.equal(numbers_of(alone, "key"), numbers_of(together, "key"))


def test_padded_rows_store_nothing() -> None:
    made = case(torch.float16, 64)._replace(slots=torch.full((len(SLOTS),), -1))
    for dtype in KV_DTYPES:
        kv = zero_blocks(dtype, 64)
        made.run(kv)
        for stored in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            assert stored is None or not stored.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_that_is_not_finite_is_stored_so_and_spoils_no_other(kv_dtype: torch.dtype, bad: float) -> None:
    clean = case(torch.float16, 64, has_norm=True)
    num_query_numbers, poisoned = 6 * 64, 1
    heads = clean.heads.clone()
    heads[poisoned, num_query_numbers + 3] = bad  # of K, head 0
    heads[poisoned, num_query_numbers + 3 * 64 + 5] = bad  # of V, head 1
    good, spoilt = zero_blocks(kv_dtype, 64), zero_blocks(kv_dtype, 64)
    clean.run(good)
    clean._replace(heads=heads).run(spoilt)
    block, offset = divmod(SLOTS[poisoned], BLOCK_SIZE)
    for kind, bad_head in (("key", 0), ("value", 1)):
        got, right = numbers_of(spoilt, kind), numbers_of(good, kind)
        assert not got[block, LAYER, bad_head, offset].isfinite().all()
        if spoilt.key_scales is not None:
            assert got[block, LAYER, bad_head, offset].isnan().all() or bad == float("inf")
        got[block, LAYER, bad_head, offset] = right[block, LAYER, bad_head, offset] = 0
        assert torch.equal(got, right)


def numbers_of(kv: KVBlocks, kind: str) -> Tensor:
    """float32, as attention reads them."""
    stored, scales = (kv.keys, kv.key_scales) if kind == "key" else (kv.values, kv.value_scales)
    return stored.float() if scales is None else reference.dequantise_rows(stored, scales)


def test_quantised_rows_are_near_what_they_stand_for() -> None:
    """Independent of the specification's own quantiser."""
    made = case(torch.float16, 128)
    _, keys, _ = made.expected()
    for dtype, step in ((torch.int8, 0.51 / 127), (torch.uint8, 1 / 16)):
        kv = zero_blocks(dtype, 128)
        made.run(kv)
        for row, slot in enumerate(SLOTS):
            if slot >= 0:
                block, offset = divmod(slot, BLOCK_SIZE)
                got = numbers_of(kv, "key")[block, LAYER, :, offset].double()
                largest = keys[row].abs().amax(-1, keepdim=True)
                assert ((got - keys[row]).abs() <= step * largest + TOLERANCES[torch.float32]).all()


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_blocks_may_lie_beyond_2_to_the_31_numbers(kv_dtype: torch.dtype) -> None:
    block_bytes, last = 1 << 20, 5000
    made = case(torch.float16, 64)
    kv = blocks_of(sparse_bytes(last + 1, block_bytes), kv_dtype, 64)
    made._replace(slots=made.slots + torch.where(made.slots < 0, 0, (last - 2) * BLOCK_SIZE)).run(kv)
    right = zero_blocks(kv_dtype, 64)
    made.run(right)
    for stored, expected in ((kv.keys, right.keys), (kv.values, right.values), (kv.key_scales, right.key_scales)):
        assert expected is None or (stored is not None and torch.equal(stored[last - 2 :], expected))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize(("dtype", "kv_dtype"), list(product(COMPUTE_DTYPES, KV_DTYPES)))
@pytest.mark.parametrize("shape", [(9, 3), (7, 1), (5, 5), (16, 2)])
def test_every_combination(shape: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> None:
    check(case(dtype, head_dim, shape, has_norm=True), kv_dtype)
