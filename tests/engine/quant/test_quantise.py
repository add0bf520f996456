"""Float matrices in other formats: how far they may be off, and what stays exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chatkv.engine.quant import quantise as quantise_module
from chatkv.engine.quant.formats import format_of, is_finite, parts_of
from chatkv.engine.quant.quantise import quantise
from chatkv.engine.quant.spec import WEIGHT_FORMATS, QuantSpec, WeightFormat, spec_of
from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight

HALF_STEP = 2.0**-11
"""Relative error of a float16."""
GROUPED = [QuantSpec(kind, size) for kind in ("int8", "int4", "int4-affine") for size in (32, 64, 128)]  # type: ignore[arg-type]
SEARCHABLE = [*GROUPED, QuantSpec("fp8")]
ALL = [
    *SEARCHABLE,
    *(replace(spec, is_searched=True) for spec in SEARCHABLE),
    *map(QuantSpec, ("bf16", "nf4", "int8-bnb")),
]


def name_of(spec: QuantSpec) -> str:
    return f"{spec.name}{' searched' if spec.is_searched else ''}"


def matrix(num_rows: int = 21, num_columns: int = 256, seed: int = 0) -> Tensor:
    """Rows of different size, with outliers, one of them constant, one zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_columns, generator=generator) * torch.rand(num_rows, 1, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.01] *= 8
    rows[3], rows[5] = 0.0, 0.25
    return rows * 0.05


def error_of(rows: Tensor, spec: QuantSpec) -> Tensor:
    """Squared, [num_rows, num_groups]."""
    found = dequantise(quantise(FpWeight(rows), spec))
    return (found - rows).square().unflatten(1, (-1, spec.group_size or rows.shape[1])).sum(-1)


@pytest.mark.parametrize("spec", ALL, ids=name_of)
def test_the_result_has_the_format_it_is_called_after_and_the_size_that_was_foretold(spec: QuantSpec) -> None:
    packed = quantise(FpWeight(matrix()), spec)
    assert format_of(packed) == spec.name
    assert packed.shape == (21, 256)
    assert sum(part.nbytes for part in parts_of("", packed).values()) == spec.packed_bytes(21, 256)
    assert is_finite(packed)


@pytest.mark.parametrize("spec", GROUPED, ids=name_of)
def test_nearest_quanta_are_off_by_half_a_step_at_most(spec: QuantSpec) -> None:
    rows = matrix()
    packed = quantise(FpWeight(rows), spec)
    assert isinstance(packed, Int8Weight | Int4Weight)
    step = packed.scales.float().abs().repeat_interleave(packed.group_size, dim=1)
    # The largest number is met as nearly as a float16 scale, and minimum, allow. A positive one that is the largest of
    # int4's group is one whole step off: there is no quantum 8.
    largest = rows.unflatten(1, (-1, packed.group_size)).abs().amax(-1).repeat_interleave(packed.group_size, dim=1)
    bound = step / 2 + 2 * largest * HALF_STEP + 2**-24
    error = (dequantise(packed) - rows).abs()
    is_whole = rows.abs() > largest - step / 2
    if spec.kind == "int4":
        bound = torch.where(is_whole, bound + step, bound)
    assert bool((error <= bound).all())


def test_fp8_is_off_by_a_sixteenth_at_most_and_keeps_what_it_can_hold() -> None:
    rows = matrix()
    packed = quantise(FpWeight(rows), QuantSpec("fp8"))
    assert isinstance(packed, Fp8Weight)
    smallest = packed.scales.unsqueeze(1) * 2**-10
    assert bool(((dequantise(packed) - rows).abs() <= (rows.abs() / 16).maximum(smallest) * 1.0001).all())
    numbers = torch.arange(256, dtype=torch.uint8)
    exact = numbers[numbers & 0x7F != 0x7F].view(torch.float8_e4m3fn).float().unsqueeze(0) * 0.375
    assert torch.equal(dequantise(quantise(FpWeight(exact), QuantSpec("fp8"))), exact)


@pytest.mark.parametrize("spec", SEARCHABLE, ids=name_of)
def test_no_group_is_worse_for_the_search_and_most_are_better(spec: QuantSpec) -> None:
    rows = matrix()
    nearest, found = error_of(rows, spec), error_of(rows, replace(spec, is_searched=True))
    # Both are sums of rounded squares.
    assert bool((found <= nearest * 1.00001 + 1e-12).all())
    assert float((found < nearest).float().mean()) > 0.5
    assert float(found.sum() / nearest.sum()) < {"int8": 0.995, "fp8": 0.995}.get(spec.kind, 0.96)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=64, max_size=64),
    st.sampled_from([QuantSpec(kind, size) for kind in ("int8", "int4", "int4-affine") for size in (32, 64)]),  # type: ignore[arg-type]
)
def test_the_search_is_never_worse_whatever_the_numbers(numbers: list[float], spec: QuantSpec) -> None:
    rows = torch.tensor([numbers])
    searched = replace(spec, is_searched=True)
    found = error_of(rows, searched)
    assert bool(found.isfinite().all())
    assert bool((found <= error_of(rows, spec) * 1.0001 + 1e-9).all())


@pytest.mark.parametrize("spec", ALL, ids=name_of)
def test_zeros_stay_zeros_and_numbers_on_the_grid_stay(spec: QuantSpec) -> None:
    assert not bool(dequantise(quantise(FpWeight(torch.zeros(3, 128)), spec)).any())
    if spec.kind in ("int4", "int4-affine", "int8"):
        quanta = torch.arange(128).float() % 16 - 8
        rows = torch.stack((quanta, -quanta - 1 if spec.kind == "int4-affine" else quanta)) * 0.125
        if spec.kind == "int8":
            rows[:, ::32] = 127 * 0.125
        assert torch.equal(dequantise(quantise(FpWeight(rows), spec)), rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", ALL, ids=name_of)
def test_half_precision_is_quantised_as_the_float32_that_it_stands_for(spec: QuantSpec, dtype: torch.dtype) -> None:
    rows = matrix().to(dtype)
    if spec.kind == "bf16":
        assert quantise(FpWeight(rows), spec).shape == (21, 256)
        assert torch.equal(dequantise(quantise(FpWeight(rows), spec)), rows.float()), "16 bits are 16 bits"
    else:
        assert torch.equal(
            dequantise(quantise(FpWeight(rows), spec)), dequantise(quantise(FpWeight(rows.float()), spec))
        )


@pytest.mark.parametrize("spec", ALL, ids=name_of)
def test_rows_do_not_depend_on_the_chunk_they_are_quantised_in(
    spec: QuantSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, done = matrix(), []
    whole = quantise(FpWeight(rows), spec)
    monkeypatch.setattr(quantise_module, "CHUNK_NUMBERS", 4 * 256)
    cut = quantise(FpWeight(rows), spec, done.append)
    for name, part in parts_of("", whole).items():
        assert torch.equal(parts_of("", cut)[name].view(torch.uint8), part.view(torch.uint8))
    assert done == ([] if spec.kind == "bf16" else [4, 8, 12, 16, 20, 21])


def test_groups_shrink_until_they_divide_the_columns() -> None:
    wide = QuantSpec("int4", 128)
    for num_columns, name in ((256, "int4-g128"), (192, "int4-g64"), (96, "int4-g32")):
        assert format_of(quantise(FpWeight(torch.randn(2, num_columns)), wide)) == name
    for spec in (wide, QuantSpec("nf4")):
        odd = FpWeight(torch.randn(2, 80))
        assert quantise(odd, spec) is odd
        assert spec.packed_bytes(2, 80) is None


def test_numbers_beyond_float16_are_told_from_others() -> None:
    rows = torch.full((1, 32), 1e9)
    assert not is_finite(quantise(FpWeight(rows), QuantSpec("int8", 32)))
    assert not is_finite(quantise(FpWeight(rows), QuantSpec("int4-affine", 32, is_searched=True)))


def test_every_format_that_can_be_asked_for_means_something_of_its_own() -> None:
    asked: list[WeightFormat] = [name for name in WEIGHT_FORMATS if name not in ("auto", "as-is")]
    specs = [spec for name in asked if (spec := spec_of(name))]
    assert len({spec.identity for spec in specs}) == len(asked)
    assert all((spec.packed_bytes(4096, 4096) or 1e9) <= 2 * 4096**2 for spec in specs)
    assert {spec.group_size for spec in specs} == {None, 32}, "as tiles hold them"
    assert spec_of("as-is") is None


def test_bits_a_weight_by_hand() -> None:
    found = {name_of(spec): 8 * (spec.packed_bytes(4096, 4096) or 0) / 4096**2 for spec in ALL if not spec.is_searched}
    assert found == {
        "bf16": 16.0,
        "int8-g32": 8.5,
        "int8-g64": 8.25,
        "int8-g128": 8.125,
        "int4-g32": 4.5,
        "int4-g64": 4.25,
        "int4-g128": 4.125,
        "int4-affine-g32": 5.0,
        "int4-affine-g64": 4.5,
        "int4-affine-g128": 4.25,
        "nf4": 4.5,
        "fp8": 8 + 32 / 4096,
        "int8-bnb": 8 + 32 / 4096,
    }
    assert math.isclose(sum(found.values()), 16 + 24.875 + 12.875 + 13.75 + 4.5 + 16 + 64 / 4096)
