"""Packed weights as tiles, the order in which native kernels read them, and back. Exact both ways.

A tile is 16 rows x 32 columns, q[r][column]; `abi.h` of the native kernels says the same:
    int4-affine  fp16 scale[16], fp16 minimum[16], nibbles[256]
    int4         fp16 scale[16], nibbles[256]
    int8         fp16 scale[16], int8[512]
    nibbles: byte [64 c + 4 r + j] = q[r][8 c + j] | q[r][8 c + 4 + j] << 4     (c < 4, r < 16, j < 4)
    int8:    byte [64 c + 4 r + j] = q[r][4 c + j]                              (c < 8)

Four neighbouring bytes (j above) stay together on the way, so that everything here moves words of 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .weights import GROUP_SIZE, TILE_BYTES, TILE_ROWS, Int4Weight, Int8Weight, TiledWeight

_LOW = 0x0F0F0F0F
_HIGH = ~_LOW
_CHUNK_BYTES = 4 << 20
"""Tiles laid out at a time: scratch memory stays small. Measured: smaller ones are slower."""


class _Fields(NamedTuple):
    """Views into tiles, rows last."""

    scales: Tensor
    """float16 [num_tiles, num_groups, 16]"""
    minimums: Tensor | None
    words: Tensor
    """int32 [num_tiles, num_groups, c, 16]"""


def fits_tiles(weight: Int4Weight | Int8Weight) -> bool:
    """Whether tiles can hold it: groups of 32, float16 scales."""
    return weight.group_size == GROUP_SIZE and weight.scales.dtype == torch.float16


def tile(weight: Int4Weight | Int8Weight) -> TiledWeight:
    """Tiles of their own memory, the last rows padded with zeros. Raises ValueError for what they cannot hold."""
    if not fits_tiles(weight):
        raise ValueError(
            f"tiles hold groups of {GROUP_SIZE} with float16 scales, "
            f"not groups of {weight.group_size} with {str(weight.scales.dtype).removeprefix('torch.')}"
        )
    num_rows, num_columns = weight.shape
    name = tile_format(weight)
    shape = tiles_shape(name, num_rows, num_columns)
    tiles = torch.empty(shape, dtype=torch.uint8)
    step = _tiles_per_chunk(shape)
    for first in range(0, shape[0], step):
        rows = slice(first * TILE_ROWS, (first + step) * TILE_ROWS)
        fields = _fields(name, tiles[first : first + step])
        fields.scales.copy_(_by_tile(weight.scales[rows]).transpose(1, 2))
        if isinstance(weight, Int4Weight):
            if weight.minimums is not None:
                assert fields.minimums is not None
                fields.minimums.copy_(_by_tile(weight.minimums[rows]).transpose(1, 2))
            words = _tiled_nibbles(weight.quanta[rows].view(torch.int32))
        else:
            words = weight.quanta[rows].view(torch.int32)
        fields.words.copy_(_by_tile(words).permute(0, 2, 3, 1))
    return TiledWeight(name, tiles, num_rows)


def untile(weight: TiledWeight) -> Int4Weight | Int8Weight:
    """Inverse of `tile`."""
    num_rows, num_groups = weight.num_rows, weight.tiles.shape[1]
    num_padded = len(weight.tiles) * TILE_ROWS
    scales = torch.empty(num_padded, num_groups, dtype=torch.float16)
    minimums = torch.empty_like(scales) if weight.format == "int4-affine" else None
    words = torch.empty(num_padded, num_groups, 8 if weight.format == "int8" else 4, dtype=torch.int32)
    step = _tiles_per_chunk(weight.tiles.shape)
    for first in range(0, len(weight.tiles), step):
        rows = slice(first * TILE_ROWS, (first + step) * TILE_ROWS)
        fields = _fields(weight.format, weight.tiles[first : first + step])
        _by_tile(scales[rows]).copy_(fields.scales.transpose(1, 2))
        if minimums is not None and fields.minimums is not None:
            _by_tile(minimums[rows]).copy_(fields.minimums.transpose(1, 2))
        by_row = fields.words.permute(0, 3, 1, 2)
        _by_tile(words[rows]).copy_(by_row if weight.format == "int8" else _plain_nibbles(by_row.contiguous()))
    return _packed(words[:num_rows], scales[:num_rows], None if minimums is None else minimums[:num_rows])


def untiled_rows(weight: TiledWeight, rows: Tensor) -> Int4Weight | Int8Weight:
    """The given rows (int64 [n]) of `untile(weight)`; nothing else is read."""
    fields = _fields(weight.format, weight.tiles)
    tiles, rows_in_tile = rows // TILE_ROWS, rows % TILE_ROWS
    words = fields.words[tiles, :, :, rows_in_tile]
    return _packed(
        words if weight.format == "int8" else _plain_nibbles(words),
        fields.scales[tiles, :, rows_in_tile],
        None if fields.minimums is None else fields.minimums[tiles, :, rows_in_tile],
    )


def has_zero_padding(weight: TiledWeight) -> bool:
    """Whether all rows past `num_rows` are zero, as `tile` leaves them."""
    num_rows = weight.num_rows % TILE_ROWS
    if not num_rows:
        return True
    last = untile(TiledWeight(weight.format, weight.tiles[-1:], TILE_ROWS))
    parts = (last.quanta, last.scales, last.minimums if isinstance(last, Int4Weight) else None)
    return not any(bool(part[num_rows:].view(torch.uint8).any()) for part in parts if part is not None)


def tile_format(weight: Int4Weight | Int8Weight) -> str:
    """The key of TILE_BYTES."""
    if isinstance(weight, Int8Weight):
        return "int8"
    return "int4" if weight.minimums is None else "int4-affine"


def tiles_shape(name: str, num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Shape of the tiles of a matrix; `num_columns` is a multiple of 32."""
    return -(-num_rows // TILE_ROWS), num_columns // GROUP_SIZE, TILE_BYTES[name]


def _fields(name: str, tiles: Tensor) -> _Fields:
    num_scales = 2 if name == "int4-affine" else 1
    halves, words = tiles.view(torch.float16), tiles.view(torch.int32)
    return _Fields(
        scales=halves[:, :, :TILE_ROWS],
        minimums=halves[:, :, TILE_ROWS : 2 * TILE_ROWS] if num_scales == 2 else None,
        words=words[:, :, num_scales * TILE_ROWS // 2 :].unflatten(2, (-1, TILE_ROWS)),
    )


def _packed(words: Tensor, scales: Tensor, minimums: Tensor | None) -> Int4Weight | Int8Weight:
    if words.shape[-1] == 8:
        return Int8Weight(words.contiguous().view(torch.int8), scales)
    return Int4Weight(words.contiguous().view(torch.uint8), scales, minimums)


def _tiled_nibbles(words: Tensor) -> Tensor:
    """int32 [..., 4] of an Int4Weight, a word's low halves 16 columns before its high ones -> [..., c], 4 columns."""
    even, odd = words[..., 0::2], words[..., 1::2]
    return torch.cat(((even & _LOW) | ((odd & _LOW) << 4), ((even >> 4) & _LOW) | (odd & _HIGH)), dim=-1)


def _plain_nibbles(words: Tensor) -> Tensor:
    """Inverse of `_tiled_nibbles`."""
    first, last = words[..., :2], words[..., 2:]
    even, odd = (first & _LOW) | ((last & _LOW) << 4), ((first >> 4) & _LOW) | (last & _HIGH)
    return torch.stack((even, odd), dim=-1).flatten(-2)


def _by_tile(rows: Tensor) -> Tensor:
    """[n, ...] -> [num_tiles, 16, ...], padded with zeros."""
    padding = -len(rows) % TILE_ROWS
    if padding:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, padding))
    return rows.unflatten(0, (-1, TILE_ROWS))


def _tiles_per_chunk(shape: tuple[int, ...]) -> int:
    return max(1, _CHUNK_BYTES // max(1, shape[1] * shape[2]))
