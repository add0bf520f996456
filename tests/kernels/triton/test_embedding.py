"""Rows of the token table, from every kind of matrix, against the specification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.triton.embedding import embed
from chatkv.kernels.triton.matrices import FpMatrix, SideBySide, to_device
from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, Weight
from tests.kernels.triton.numbers import COMPUTE_DTYPES, random

NUM_TOKENS = 11
IDS = [3, 0, 10, 3]


def scales(width: int, group_size: int, dtype: torch.dtype) -> Tensor:
    return (random(NUM_TOKENS, width // group_size, seed=1).abs() / 10 + 0.01).to(dtype)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def int8_weight(width: int, group_size: int, scale_dtype: torch.dtype = torch.float16) -> Weight:
    quanta = bytes_of(NUM_TOKENS, width // group_size, group_size).view(torch.int8)
    return Int8Weight(quanta, scales(width, group_size, scale_dtype))


def int4_weight(width: int, group_size: int, has_minimums: bool, scale_dtype: torch.dtype = torch.float16) -> Weight:
    quanta = bytes_of(NUM_TOKENS, width // group_size, group_size // 2)
    minimums = random(NUM_TOKENS, width // group_size, seed=3).to(scale_dtype) if has_minimums else None
    return Int4Weight(quanta, scales(width, group_size, scale_dtype), minimums)


def fp8_weight(width: int) -> Weight:
    values = random(NUM_TOKENS, width).mul(40).to(torch.float8_e4m3fn).view(torch.uint8)
    return Fp8Weight(values, random(NUM_TOKENS, seed=1).abs())


def check(weight: Weight, ids: Tensor, dtype: torch.dtype = torch.float16) -> None:
    hidden = embed(ids, to_device([weight], None, "cpu", dtype))
    assert hidden.dtype == torch.float32
    expected = reference.embedding(ids.long(), weight)
    if isinstance(weight, FpWeight):
        expected = expected.to(dtype).float()
    torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("width", [16, 100, 576, 1500])
def test_floats(width: int, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    check(FpWeight(random(NUM_TOKENS, width)), torch.tensor(IDS, dtype=id_dtype), dtype)


@pytest.mark.parametrize("width", [64, 1152])
def test_fp8(width: int) -> None:
    check(fp8_weight(width), torch.tensor(IDS))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int8(group_size: int, scale_dtype: torch.dtype) -> None:
    check(int8_weight(1152, group_size, scale_dtype), torch.tensor(IDS))


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4(group_size: int, scale_dtype: torch.dtype, has_minimums: bool) -> None:
    check(int4_weight(1152, group_size, has_minimums, scale_dtype), torch.tensor(IDS))


@pytest.mark.parametrize("ids", [[], [7], list(range(NUM_TOKENS))])
def test_every_row_count(ids: list[int]) -> None:
    check(int4_weight(64, 32, True), torch.tensor(ids, dtype=torch.int32))


@pytest.mark.parametrize(
    "weight",
    [FpWeight(random(NUM_TOKENS, 64)), fp8_weight(64), int8_weight(64, 32), int4_weight(64, 32, True)],
    ids=["fp", "fp8", "int8", "int4"],
)
def test_padding_gives_zeros_and_a_token_past_the_table_nan(weight: Weight) -> None:
    table = to_device([weight], None, "cpu", torch.float16)
    hidden = embed(torch.tensor([1, -1, NUM_TOKENS, 2], dtype=torch.int32), table)
    alone = embed(torch.tensor([1, 2]), table)
    assert torch.equal(hidden[[0, 3]], alone)
    assert not hidden[1].any()
    assert hidden[2].isnan().all()


def test_a_token_whose_row_is_not_finite_spoils_no_other() -> None:
    values = random(NUM_TOKENS, 64)
    good = embed(torch.tensor([3, 4]), FpMatrix(values.bfloat16()))
    values[4, 5] = float("nan")
    hidden = embed(torch.tensor([3, 4]), FpMatrix(values.bfloat16()))
    assert torch.equal(hidden[0], good[0])
    assert hidden[1].isnan().sum() == 1


def test_matrices_side_by_side_are_no_table() -> None:
    part = FpMatrix(torch.zeros(2, 64, dtype=torch.float16))
    with pytest.raises(TypeError, match="SideBySide"):
        embed(torch.tensor([0]), SideBySide((part, part)))
