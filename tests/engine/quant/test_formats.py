"""Packed matrices as a file's parts, and back; parts that cannot be right are refused."""

from __future__ import annotations

import pytest
import torch

from chatkv.engine.errors import BrokenModelError
from chatkv.engine.quant.formats import (
    PackedTensor,
    format_of,
    is_finite,
    logical,
    parts_of,
    shape_of,
    stored,
    tensor_from_parts,
    tensor_name,
)
from chatkv.kernels.reference import dequantise
from chatkv.kernels.tile_layout import tile
from chatkv.kernels.weights import BnbInt8Weight, Fp8Weight, FpWeight, Int4Weight, Int8Weight, Nf4Weight, TiledWeight

NAME = "model.layers.0.mlp.down_proj.weight"
NUM_ROWS, NUM_GROUPS = 35, 3


def tensors() -> dict[str, PackedTensor]:
    generator = torch.Generator().manual_seed(0)
    int4 = torch.randint(0, 256, (NUM_ROWS, NUM_GROUPS, 16), generator=generator, dtype=torch.uint8)
    int8 = torch.randint(-127, 128, (NUM_ROWS, NUM_GROUPS, 32), generator=generator, dtype=torch.int8)
    scales, minimums = torch.randn(2, NUM_ROWS, NUM_GROUPS, generator=generator).half()
    return {
        "vector": torch.randn(7),
        "bf16": FpWeight(torch.randn(NUM_ROWS, 96, generator=generator).bfloat16()),
        "int8-g32": Int8Weight(int8, scales),
        "int4-g32": Int4Weight(int4, scales),
        "int4-affine-g32": Int4Weight(int4, scales, minimums),
        "int4-g64": Int4Weight(int4[:34].view(-1, NUM_GROUPS, 32), scales[:17]),
        "int4-affine-g128": Int4Weight(int4[:32].view(-1, NUM_GROUPS, 64), scales[:8], minimums[:8]),
        "int8-g128": Int8Weight(int8[:32].view(-1, NUM_GROUPS, 128), scales[:8].float() / 3),
        "fp8": Fp8Weight(int4.flatten(1) & 0xF7, scales[:, 0].float() / 3),
        "nf4": Nf4Weight(int4[:32].view(-1, 96), scales[:16].float() / 3),
        "int8-bnb": BnbInt8Weight(int8.flatten(1), scales[:, 0].float() / 3),
    }


TILED = ["int8-g32", "int4-g32", "int4-affine-g32"]
PLAIN = ["int4-g64", "int4-affine-g128", "int8-g128", "fp8", "nf4", "int8-bnb"]


def numbers(tensor: PackedTensor) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else dequantise(tensor)


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_is_put_together_again_from_its_parts(name: str) -> None:
    tensor = tensors()[name]
    for form in (tensor, stored(tensor), logical(stored(tensor))):
        parts = parts_of(NAME, form)
        assert {tensor_name(part) for part in parts} == {NAME}
        again = tensor_from_parts(NAME, parts, shape_of(tensor))
        assert type(again) is type(form)
        assert format_of(again) == format_of(tensor)
        assert torch.equal(numbers(again), numbers(tensor))
    assert len(parts_of(NAME, stored(tensor))) == (1 if name not in PLAIN else len(parts_of(NAME, tensor)))
    assert name in ("vector", format_of(tensor))


@pytest.mark.parametrize("name", PLAIN[:3])
def test_tiles_hold_groups_of_32_with_float16_scales_alone(name: str) -> None:
    tensor = tensors()[name]
    assert isinstance(tensor, Int4Weight | Int8Weight)
    with pytest.raises(ValueError, match="groups of 32"):
        tile(tensor)
    in_float32 = Int8Weight(torch.zeros(2, 3, 32, dtype=torch.int8), torch.ones(2, 3))
    assert stored(in_float32) is in_float32


@pytest.mark.parametrize(
    ("name", "suffix"), [("int8-g32", ".t8"), ("int4-g32", ".t4"), ("int4-affine-g32", ".t4a"), ("bf16", "")]
)
def test_what_is_stored_has_a_name_that_tells_its_format(name: str, suffix: str) -> None:
    assert list(parts_of(NAME, stored(tensors()[name]))) == [NAME + suffix]


@pytest.mark.parametrize("name", TILED)
def test_tiles_that_do_not_fit_are_refused(name: str) -> None:
    ((part_name, tiles),) = parts_of(NAME, stored(tensors()[name])).items()
    shape = (NUM_ROWS, NUM_GROUPS * 32)
    for damaged in (tiles[:-1], tiles[..., :-32], tiles.view(torch.int8), tiles.flatten(1), tiles[0]):
        with pytest.raises(BrokenModelError, match=NAME):
            tensor_from_parts(NAME, {part_name: damaged}, shape)
    for other in ((NUM_ROWS + 16, shape[1]), (NUM_ROWS, shape[1] + 32), (NUM_ROWS,)):
        with pytest.raises(BrokenModelError, match=NAME):
            tensor_from_parts(NAME, {part_name: tiles}, other)
    for right in (33, 48):  # Padding is not told from rows: the config decides.
        assert shape_of(tensor_from_parts(NAME, {part_name: tiles}, (right, shape[1]))) == (right, shape[1])


@pytest.mark.parametrize("name", [*TILED, *PLAIN])
def test_plain_parts_that_do_not_fit_are_refused(name: str) -> None:
    tensor = tensors()[name]
    parts = parts_of(NAME, tensor)
    for part in parts:
        with pytest.raises(BrokenModelError, match=NAME):
            tensor_from_parts(NAME, parts | {part: parts[part][:-1]}, shape_of(tensor))
        with pytest.raises(BrokenModelError, match=NAME):
            tensor_from_parts(NAME, parts | {part: parts[part].double()}, shape_of(tensor))
        if not part.endswith(".minimums"):
            with pytest.raises(BrokenModelError, match="missing"):
                tensor_from_parts(NAME, {k: v for k, v in parts.items() if k != part}, shape_of(tensor))
    with pytest.raises(BrokenModelError, match="missing"):
        tensor_from_parts(NAME, {}, shape_of(tensor))


def test_infinite_scales_are_found_in_tiles() -> None:
    scales = torch.ones(NUM_ROWS, NUM_GROUPS).half()
    int8 = Int8Weight(torch.zeros(NUM_ROWS, NUM_GROUPS, 32, dtype=torch.int8), scales)
    tiled = stored(int8)
    assert isinstance(tiled, TiledWeight)
    assert is_finite(tiled)
    scales[NUM_ROWS - 1, 1] = float("inf")
    assert not is_finite(stored(int8))


def test_an_fp8_byte_that_is_no_number_is_found() -> None:
    values = torch.full((2, 32), 0xFE, dtype=torch.uint8)
    assert is_finite(Fp8Weight(values, torch.ones(2)))
    values[1, 3] = 0xFF
    assert not is_finite(Fp8Weight(values, torch.ones(2)))
    assert not is_finite(Fp8Weight(values[:1], torch.full((1,), torch.inf)))
