"""Products of quantised rows and tiled matrices: each bit as the arithmetic says, however the work is shared out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.tile_layout import tile, untile
from chatkv.kernels.weights import Int4Weight, Int8Weight, TiledWeight
from tests.kernels.native.one_op import (
    GUARD_VALUE,
    Product,
    QuantisedRows,
    linear,
    other_variants,
    quantise,
    same_bits,
)

FORMATS = ("int4-affine", "int4", "int8")

both_planes = pytest.mark.parametrize("is_fine", [False, True], ids=["coarse", "fine"])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def matrix(name: str, num_rows: int, num_columns: int, seed: int = 0) -> TiledWeight:
    """Quanta of every value."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = num_columns // 32
    scales = (torch.rand(num_rows, num_groups, generator=generator) / 50 + 1e-3).half()
    if name == "int8":
        quanta = torch.randint(-127, 128, (num_rows, num_groups, 32), generator=generator, dtype=torch.int8)
        return tile(Int8Weight(quanta, scales))
    quanta = torch.randint(0, 256, (num_rows, num_groups, 16), generator=generator, dtype=torch.uint8)
    minimums = -scales * torch.randint(5, 11, scales.shape, generator=generator)
    return tile(Int4Weight(quanta, scales, minimums if name == "int4-affine" else None))


def product_by_torch(rows: QuantisedRows, weight: TiledWeight) -> Tensor:
    """The same arithmetic, group by group. An fma is exact in float64 but for its one rounding."""
    plain = untile(weight)
    if isinstance(plain, Int8Weight):
        quanta = plain.quanta.double()
    else:
        quanta = torch.cat((plain.quanta & 15, plain.quanta >> 4), dim=-1).double()
        if plain.minimums is None:
            quanta -= 8
    sums = torch.zeros(len(rows.quanta), weight.num_rows)
    for g, group in enumerate(rows.joined_quanta().unflatten(1, (-1, 32)).unbind(1)):
        dots = (group @ quanta[:, g].T).float() * rows.scales[:, g : g + 1]
        sums = (plain.scales[:, g].double() * dots.double() + sums.double()).float()
        if isinstance(plain, Int4Weight) and plain.minimums is not None:
            offsets = rows.offsets[:, g : g + 1].double()
            sums = (plain.minimums[:, g].double() * offsets + sums.double()).float()
    return sums


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_columns", [32, 96, 1536])
@both_planes
def test_each_output_is_as_the_arithmetic_says(name: str, num_columns: int, is_fine: bool) -> None:
    weight, rows = matrix(name, 43, num_columns), quantise(numbers(9, num_columns), is_fine=is_fine)
    assert torch.equal(linear(rows, [Product(weight)]), product_by_torch(rows, weight))


@pytest.mark.parametrize("name", FORMATS)
@both_planes
def test_it_is_near_the_product_of_what_is_stored(name: str, is_fine: bool) -> None:
    """Of the stored numbers to float32's precision; of what the activations were, to that of 8 bits or 16."""
    weight, x = matrix(name, 64, 1536), numbers(6, 1536)
    rows = quantise(x, is_fine=is_fine)
    found, exact = linear(rows, [Product(weight)]), reference.dequantise(weight).double()
    of_stored, of_floats = rows.numbers() @ exact.T, x.double() @ exact.T
    size = float(of_floats.norm())
    assert float((found - of_stored).norm()) / size < 1e-6
    assert float((found - of_floats).norm()) / size < (4e-5 if is_fine else 1e-2)


@pytest.mark.parametrize("name", FORMATS)
@both_planes
def test_variants_and_row_counts_and_threads_give_the_same_bits(name: str, is_fine: bool) -> None:
    weight, rows = matrix(name, 85, 576), quantise(numbers(300, 576), is_fine=is_fine)
    expected = linear(rows, [Product(weight)])
    for variant in ("scalar", *other_variants()):
        assert same_bits(linear(rows, [Product(weight)], variant=variant, num_threads=3), expected)
        for num_rows in (*range(1, 15), 63, 64, 127, 200):
            begin = 300 - num_rows
            found = linear(rows.rows(begin, 300), [Product(weight)], variant=variant)
            assert same_bits(found, expected[begin:]), (variant, num_rows)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 32, 33, 50])
@both_planes
def test_any_number_of_outputs_with_bias_and_sum_at_any_address(name: str, num_outputs: int, is_fine: bool) -> None:
    weight, bias = matrix(name, num_outputs, 64), numbers(num_outputs, seed=1)
    for num_rows in (1, 2, 7):
        rows = quantise(numbers(num_rows, 64), is_fine=is_fine)
        before = numbers(num_rows, num_outputs, seed=2)
        plain = product_by_torch(rows, weight)
        for variant in ("scalar", *other_variants()):
            for misalignment in (0, 1, 38):
                product = Product(weight, bias, misalignment=misalignment)
                assert torch.equal(linear(rows, [product], variant=variant), plain + bias)
                added = linear(rows, [product], added_to=before, variant=variant)
                assert torch.equal(added, before + (plain + bias))
                added = linear(rows, [product._replace(bias=None)], added_to=before, variant=variant)
                assert torch.equal(added, before + plain)


@both_planes
def test_matrices_of_different_formats_side_by_side(is_fine: bool) -> None:
    rows = quantise(numbers(8, 96), is_fine=is_fine)
    weights = [matrix(name, size, 96, size) for name, size in zip(FORMATS, (35, 16, 7), strict=True)]
    products = [
        Product(weight, bias=numbers(weight.num_rows), first_output=first)
        for weight, first in zip(weights, (0, 37, 60), strict=True)
    ]
    for variant in ("scalar", *other_variants()):
        for num_threads in (1, 2):
            found = linear(rows, products, variant=variant, num_threads=num_threads)
            for product in products:
                end = product.first_output + product.weight.num_rows
                expected = product_by_torch(rows, product.weight) + product.bias
                assert torch.equal(found[:, product.first_output : end], expected)
            assert bool((found[:, 35:37] == GUARD_VALUE).all() and (found[:, 53:60] == GUARD_VALUE).all())


@pytest.mark.parametrize("name", FORMATS)
@both_planes
def test_the_largest_quanta_fit(name: str, is_fine: bool) -> None:
    """Sums of products in 16 bits must not saturate, nor those in 32 wrap."""
    weight = matrix(name, 32, 64)
    header = {"int4-affine": 64, "int4": 32, "int8": 32}[name]
    for byte in (0x00, 0xFF, 0xF0, 0x0F) if name != "int8" else (0x7F, 0x81):
        weight.tiles[:, :, header:] = byte
        for sign in (1, -1):
            x = torch.full((5, 64), 127.0 * sign)
            x[1::2, ::2] *= -1
            rows = quantise(x, is_fine=is_fine)
            assert bool((rows.quanta.abs() == 127).all())
            if rows.low is not None:
                assert not bool(rows.low.any())
                rows.low.copy_(rows.quanta)  # more than there can be
                rows.sums.copy_(rows.joined_quanta().unflatten(1, (-1, 32)).sum(-1))
                rows.offsets.copy_(rows.scales * rows.sums)
            for variant in ("scalar", *other_variants()):
                assert torch.equal(linear(rows, [Product(weight)], variant=variant), product_by_torch(rows, weight))


@pytest.mark.parametrize("name", FORMATS)
@both_planes
def test_what_is_not_finite_reaches_all_outputs_of_its_row_alone(name: str, is_fine: bool) -> None:
    weight, x = matrix(name, 40, 96), numbers(9, 96)
    clean = linear(quantise(x, is_fine=is_fine), [Product(weight)])
    x[2, 40], x[5, 95], x[6, 0] = math.nan, math.inf, -math.inf
    rows = quantise(x, is_fine=is_fine)
    for variant in ("scalar", *other_variants()):
        found = linear(rows, [Product(weight)], variant=variant)
        is_bad = torch.zeros(9, dtype=torch.bool)
        is_bad[[2, 5, 6]] = True
        assert bool(found[is_bad].isnan().all())
        assert torch.equal(found[~is_bad], clean[~is_bad])


@pytest.mark.parametrize("name", FORMATS)
@both_planes
def test_zeros_and_tiny_and_large_numbers(name: str, is_fine: bool) -> None:
    weight, x = matrix(name, 33, 96), numbers(6, 96)
    x[0] = 0
    x[1, :32] = 0
    x[2] *= 1e-38
    x[3] *= 1e-32
    x[4] *= 1e33
    rows = quantise(x, is_fine=is_fine)
    expected = product_by_torch(rows, weight)
    assert not bool(expected[[0, 2]].any())
    assert bool(expected[3].any())
    for variant in ("scalar", *other_variants()):
        assert torch.equal(linear(rows, [Product(weight)], variant=variant), expected)
