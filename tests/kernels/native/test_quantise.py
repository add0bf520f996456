"""Quantised activations: each bit as the arithmetic says, on every instruction set and however rows are shared out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.tile_layout import tile
from chatkv.kernels.weights import Int4Weight, Int8Weight
from tests.kernels.native.one_op import (
    LOW_QUANTA,
    QuantisedRows,
    embed,
    norm_quantise,
    other_variants,
    quantise,
    same_bits,
    silu_mul_quantise,
)

EPS = 1e-5
LARGEST_QUANTUM = {False: 127, True: 127 * LOW_QUANTA}
"""Of coarse rows, and of fine ones."""

both_planes = pytest.mark.parametrize("is_fine", [False, True], ids=["coarse", "fine"])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def hard_rows() -> Tensor:
    """Every group of 32 has a difficulty of its own."""
    x = numbers(4, 320)
    groups = x.view(-1, 32)
    groups[0] = 0
    groups[1] = -0.0
    groups[2, 5] = math.nan
    groups[3, 31] = -math.inf
    groups[4, 0] = math.inf
    groups[5] *= 1e-40
    groups[6] *= 1e-37
    groups[7] *= 1e37
    groups[8] = torch.arange(-16, 16) + 0.5
    groups[8, 0] = 127
    groups[9, 17] = -1e30
    groups[10] = 0
    groups[10, 9] = 1e-45
    largest_float = torch.finfo(torch.float32).max
    groups[11] = 127 / largest_float
    groups[12] = 127 / largest_float * 1.01
    groups[13, 3] = -math.nan
    groups[14] = largest_float
    groups[15] = torch.arange(32) * LOW_QUANTA + 127.5 - 0.25 * (torch.arange(32) % 5)
    groups[15, 31] = 127 * LOW_QUANTA
    groups[16] = -groups[15]
    groups[17] = 127 * LOW_QUANTA / largest_float
    groups[18] = 127 * LOW_QUANTA / largest_float * 1.01
    return x


def quantised_by_torch(x: Tensor, is_fine: bool = False) -> QuantisedRows:
    """The same arithmetic, operation by operation. Torch makes two of `127 / largest`: it inverts, then multiplies."""
    groups = x.unflatten(1, (-1, 32))
    largest, most = groups.abs().amax(-1), LARGEST_QUANTUM[is_fine]
    inverse = torch.tensor(float(most)) / largest
    is_zero = ~(inverse < math.inf) & largest.isfinite()
    scaled = groups * torch.where(is_zero | ~largest.isfinite(), 0, inverse).unsqueeze(-1)
    quanta = scaled.nan_to_num(0).round().clamp(-most, most)
    quanta[~largest.isfinite()] = 0
    scales = torch.where(is_zero, 0, largest / most)
    scales[~largest.isfinite()] = math.nan
    sums = quanta.sum(-1)
    high = (quanta * (torch.tensor(1.0) / LOW_QUANTA)).round() if is_fine else quanta
    low = (quanta - LOW_QUANTA * high).to(torch.int8).flatten(1) if is_fine else None
    return QuantisedRows(high.to(torch.int8).flatten(1), scales, sums.int(), scales * sums, low)


def normed_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Sixteen lanes, each an fma after another (exact in float64 but for its one rounding), then sums of halves."""
    lanes = torch.zeros(len(x), 16)
    for part in x.unflatten(1, (-1, 16)).unbind(1):
        lanes = (part.double() * part.double() + lanes.double()).float()
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    root = torch.sqrt((lanes / x.shape[1] + EPS).double()).float()  # torch's root of a float32 is off by a bit at times
    scale = torch.tensor(1.0) / root
    return x * scale * weight


def assert_same(found: QuantisedRows, expected: QuantisedRows) -> None:
    for name, left, right in zip(QuantisedRows._fields, found, expected, strict=True):
        assert (left is None) == (right is None), name
        assert left is None or same_bits(left, right), name


@pytest.mark.parametrize("num_columns", [32, 576])
@both_planes
def test_each_number_is_as_the_arithmetic_says(num_columns: int, is_fine: bool) -> None:
    x = numbers(7, num_columns)
    rows = quantise(x, is_fine=is_fine)
    assert_same(rows, quantised_by_torch(x, is_fine))
    largest = x.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (rows.numbers() - x).unflatten(1, (-1, 32)).abs()
    # A float32's own rounding is not far below that of fine quanta.
    assert bool((error <= largest / LARGEST_QUANTUM[is_fine] * (0.51 if is_fine else 0.50001)).all())


def test_hard_groups_are_as_the_arithmetic_says() -> None:
    rows = quantise(hard_rows())
    assert_same(rows, quantised_by_torch(hard_rows()))
    scales, quanta = rows.scales.flatten(), rows.quanta.view(-1, 32)
    for group in (0, 1, 5, 10):
        assert scales[group] == 0
        assert not quanta[group].any()
    for group in (2, 3, 4, 13):
        assert scales[group].isnan()
        assert not quanta[group].any()
    halves_to_even = [-14, -14, -12, -12, -10, -10, -8, -8, -6, -6, -4, -4, -2, -2, 0]
    assert quanta[8].tolist() == [127, *halves_to_even, *(-quantum for quantum in halves_to_even[::-1]), 16]
    assert scales[12] > 0
    assert bool((quanta[12] == 127).all())


def test_hard_groups_of_fine_rows_are_as_the_arithmetic_says() -> None:
    rows = quantise(hard_rows(), is_fine=True)
    assert_same(rows, quantised_by_torch(hard_rows(), is_fine=True))
    scales, joined = rows.scales.flatten(), rows.joined_quanta().view(-1, 32)
    for group in (0, 1, 5, 6, 10, 11, 12):
        assert scales[group] == 0
        assert not joined[group].any()
    for group in (2, 3, 4, 13):
        assert scales[group].isnan()
        assert not joined[group].any()
    for group, sign in ((15, 1), (16, -1)):
        assert scales[group] == 1
        assert torch.equal(joined[group], hard_rows().view(-1, 32)[group].round().double())
        assert joined[group, 31] == sign * 127 * LOW_QUANTA
    assert scales[18] > 0
    assert bool((joined[18] == 127 * LOW_QUANTA).all())
    assert rows.low is not None
    assert int(rows.low.abs().max()) == 127
    assert int(rows.low.min()) == -127


@both_planes
@pytest.mark.parametrize("num_columns", [32, 64, 576])
def test_norm_is_as_the_arithmetic_says(num_columns: int, is_fine: bool) -> None:
    x, weight = numbers(5, num_columns), numbers(num_columns, seed=1)
    rows = norm_quantise(x, weight, EPS, is_fine=is_fine)
    assert_same(rows, quantised_by_torch(normed_by_torch(x, weight), is_fine))
    expected = reference.rms_norm(x, weight, EPS)
    allowed = float(expected.abs().max()) / LARGEST_QUANTUM[is_fine] * 0.51
    assert torch.allclose(rows.numbers().float(), expected, rtol=0, atol=allowed)


def test_silu_and_exp_are_near_float64() -> None:
    """One number a group shows itself in the scale, to the last bits."""
    gate = torch.zeros(2, 4000, 32)
    up = torch.zeros_like(gate)
    gate[:, :, 7] = torch.cat((torch.linspace(-87, 88, 4000), torch.linspace(-2, 2, 4000))).view(2, -1)
    up[:, :, 7] = 1.5
    rows = silu_mul_quantise(torch.cat((gate.flatten(1), up.flatten(1)), dim=1))
    exact = gate.double() / (1 + torch.exp(-gate.double())) * up
    expected = exact[:, :, 7].abs() / 127
    is_normal = expected > 1e-36
    assert int(is_normal.sum()) > 7900
    error = (rows.scales.double() - expected).abs() / expected
    assert float(error[is_normal].max()) < 5e-7
    assert bool((rows.scales[~is_normal] < 1e-35).all())


def test_silu_of_extremes() -> None:
    gate = torch.full((1, 160), 1.0)
    gate[0, 0], gate[0, 32], gate[0, 64] = math.inf, -math.inf, math.nan
    gate[0, 96:128], gate[0, 128:] = -1000, 1000
    rows = silu_mul_quantise(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert bool(rows.scales[0, :3].isnan().all())
    assert rows.scales[0, 3] == 0
    assert rows.scales[0, 4] == torch.tensor(1000.0) / 127


CASES: dict[str, Callable[[Tensor, str, int, bool], QuantisedRows]] = {
    "quantise": lambda x, variant, threads, is_fine: quantise(x, variant, threads, is_fine=is_fine),
    "norm": lambda x, variant, threads, is_fine: norm_quantise(
        x, numbers(x.shape[1], seed=2), EPS, variant, threads, is_fine=is_fine
    ),
    "silu": lambda x, variant, threads, is_fine: silu_mul_quantise(x, variant, threads, is_fine=is_fine),
}


@both_planes
@pytest.mark.parametrize("name", CASES)
def test_variants_and_threads_give_the_same_bits(name: str, is_fine: bool) -> None:
    def run(x: Tensor, variant: str, num_threads: int) -> QuantisedRows:
        return CASES[name](x, variant, num_threads, is_fine)

    for x in (numbers(37, 576), hard_rows(), numbers(3, 64) * 20, numbers(1, 1536)):
        expected = run(x, "scalar", 1)
        for row in range(0, len(x), 7):
            assert_same(run(x[row : row + 1], "scalar", 1), expected.rows(row, row + 1))
        for variant in other_variants():
            for num_threads in (1, 3):
                assert_same(run(x, variant, num_threads), expected)


def test_rows_of_a_wider_register() -> None:
    wide = numbers(5, 700)
    for variant in ("scalar", *other_variants()):
        assert_same(quantise(wide[:, 3:99], variant), quantise(wide[:, 3:99].contiguous()))


def test_norm_of_a_row_that_is_not_finite_reaches_every_group_of_it() -> None:
    x = numbers(3, 96)
    x[1, 50] = math.nan
    for variant in ("scalar", *other_variants()):
        scales = norm_quantise(x, torch.ones(96), EPS, variant).scales
        assert scales.isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]


@pytest.mark.parametrize("name", ["int8", "int4", "int4-affine"])
def test_embedding_is_the_table_s_row(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scales, minimums = (torch.randn(37, 3, generator=generator).half() for _ in range(2))
    if name == "int8":
        weight: Int8Weight | Int4Weight = Int8Weight(
            torch.randint(-127, 128, (37, 3, 32), generator=generator, dtype=torch.int8), scales
        )
    else:
        quanta = torch.randint(0, 256, (37, 3, 16), generator=generator, dtype=torch.uint8)
        weight = Int4Weight(quanta, scales, minimums if name == "int4-affine" else None)
    token_ids = torch.tensor([0, 36, 15, 16, 5, 5, 31, 20, 1], dtype=torch.int32)
    expected = reference.embedding(token_ids.long(), weight)
    for variant in ("scalar", *other_variants()):
        for num_threads in (1, 2):
            assert torch.equal(embed(token_ids, tile(weight), variant, num_threads), expected)
