"""Tiles hold what a packed matrix holds, byte by byte where `abi.h` says, and give it back exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference, tile_layout
from chatkv.kernels.tile_layout import has_zero_padding, tile, untile
from chatkv.kernels.weights import TILE_BYTES, Int4Weight, Int8Weight, TiledWeight, select_rows

FORMATS = ("int8", "int4", "int4-affine")


def packed(name: str, num_rows: int, num_groups: int, seed: int = 0) -> Int4Weight | Int8Weight:
    generator = torch.Generator().manual_seed(seed)

    def any_half() -> Tensor:
        """Every bit pattern, NaN and infinity among them."""
        bits = torch.randint(-(1 << 15), 1 << 15, (num_rows, num_groups), generator=generator, dtype=torch.int16)
        return bits.view(torch.float16)

    if name == "int8":
        quanta = torch.randint(-128, 128, (num_rows, num_groups, 32), generator=generator, dtype=torch.int8)
        return Int8Weight(quanta, any_half())
    quanta = torch.randint(0, 256, (num_rows, num_groups, 16), generator=generator, dtype=torch.uint8)
    return Int4Weight(quanta, any_half(), any_half() if name == "int4-affine" else None)


def assert_same(found: Int4Weight | Int8Weight | TiledWeight, expected: Int4Weight | Int8Weight) -> None:
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    for part in ("quanta", "scales", "minimums"):
        left, right = getattr(found, part, None), getattr(expected, part, None)
        assert (left is None) == (right is None), part
        if left is not None and right is not None:
            assert left.dtype == right.dtype
            assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)), part


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 50, 211])
@pytest.mark.parametrize("name", FORMATS)
def test_a_round_trip_is_exact(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(name, num_rows, 3)
    tiled = tile(weight)
    assert (tiled.format, tiled.shape) == (name, (num_rows, 96))
    assert tiled.tiles.shape == (-(-num_rows // 16), 3, TILE_BYTES[name])
    assert_same(untile(tiled), weight)
    monkeypatch.setattr(tile_layout, "_CHUNK_BYTES", 1)
    assert torch.equal(tile(weight).tiles, tiled.tiles)
    assert_same(untile(tiled), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_lies_where_the_native_kernels_look(name: str) -> None:
    """`abi.h`, read element by element."""
    weight = packed(name, 20, 2)
    tiles = tile(weight).tiles
    for row in range(32):
        for group in range(2):
            data = tiles[row // 16, group].tolist()
            r, at = row % 16, 32
            if row >= 20:
                assert sum(data[2 * r : 2 * r + 2]) == 0, "padding"
            else:
                assert data[2 * r : 2 * r + 2] == weight.scales[row, group : group + 1].view(torch.uint8).tolist()
            if isinstance(weight, Int4Weight) and weight.minimums is not None:
                if row < 20:
                    expected = weight.minimums[row, group : group + 1].view(torch.uint8).tolist()
                    assert data[32 + 2 * r : 34 + 2 * r] == expected
                at = 64
            for column in range(32):
                if isinstance(weight, Int8Weight):
                    byte = data[at + 64 * (column // 4) + 4 * r + column % 4]
                    expected = 0 if row >= 20 else int(weight.quanta[row, group, column]) % 256
                    assert byte == expected
                else:
                    c, place = divmod(column, 8)
                    byte = data[at + 64 * c + 4 * r + place % 4]
                    quantum = byte & 15 if place < 4 else byte >> 4
                    source = 0 if row >= 20 else int(weight.quanta[row, group, column % 16])
                    assert quantum == (source & 15 if column < 16 else source >> 4)


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_are_dequantised_and_rows_selected_as_before(name: str) -> None:
    weight = packed(name, 50, 3)
    tiled = tile(weight)
    bits = reference.dequantise(weight).view(torch.int32)
    assert torch.equal(reference.dequantise(tiled).view(torch.int32), bits)
    rows = torch.tensor([49, 0, 16, 15, 49])
    assert_same(select_rows(tiled, rows), select_rows(weight, rows))  # type: ignore[arg-type]
    assert select_rows(tiled, rows[:0]).shape == (0, 96)


@pytest.mark.parametrize("name", FORMATS)
def test_anything_in_the_padding_is_found(name: str) -> None:
    tiled = tile(packed(name, 29, 3))
    assert has_zero_padding(tiled)
    assert has_zero_padding(tile(packed(name, 32, 3)))
    for number in (2 * 13, TILE_BYTES[name] - 1, TILE_BYTES[name] - 12):  # a scale, and quanta of two rows
        damaged = tiled.tiles.clone()
        damaged[-1, 2, number] = 1
        assert not has_zero_padding(TiledWeight(name, damaged, 29))
    damaged = tiled.tiles.clone()
    damaged[-1, 2, 2 * 12] ^= 1
    assert has_zero_padding(TiledWeight(name, damaged, 29)), "a row's scale is not padding"
