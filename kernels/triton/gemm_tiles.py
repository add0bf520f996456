"""What products of many rows have in common: their tiles, which program computes which, and how one is stored.

A program computes a tile [outputs, rows] of the transposed product, the weights being the left operand: dequantised
weights are in registers, where the left operand may stay, and few rows make a narrow tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .runtime import ceil_div

ROW_TILES_TOGETHER = tl.constexpr(8)
"""Neighbouring programs share the weights of this many row tiles, so that those are read from memory once."""
NARROW_OUTPUTS = 64 * 128
"""Matrices with fewer get narrower tiles: enough programs for every multiprocessor."""


class GemmTile(NamedTuple):
    rows: int
    outputs: int
    blocks: int
    """Of 32 columns, a step of the loop."""
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_outputs: int) -> int:
        return ceil_div(num_rows, self.rows) * ceil_div(num_outputs, self.outputs)

    def options(self, num_blocks: int) -> dict[str, int]:
        """Of a launch. num_blocks: of 32 columns, in the matrix."""
        return {
            "TILE_ROWS": self.rows,
            "TILE_OUTPUTS": self.outputs,
            "TILE_BLOCKS": self.blocks,
            "HAS_TAIL": num_blocks % self.blocks != 0,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


FEW_ROWS = GemmTile(16, 64, 4, 4, 4)
FEW_ROWS_NARROW = GemmTile(16, 32, 4, 4, 6)
SOME_ROWS = GemmTile(64, 128, 2, 4, 3)
MANY_ROWS = GemmTile(128, 128, 2, 8, 3)


def gemm_tile(num_rows: int, num_outputs: int, *, is_deterministic: bool) -> GemmTile:
    """Deterministic: the same for every row count, so that a row is computed in one way."""
    if is_deterministic or num_rows <= FEW_ROWS.rows:
        return FEW_ROWS if num_outputs >= NARROW_OUTPUTS else FEW_ROWS_NARROW
    return SOME_ROWS if num_rows <= SOME_ROWS.rows else MANY_ROWS


@triton.jit
def tile_origin(num_rows, num_outputs, TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr):
    """First row and first output of this program's tile."""
    num_row_tiles, num_output_tiles = tl.cdiv(num_rows, TILE_ROWS), tl.cdiv(num_outputs, TILE_OUTPUTS)
    program = tl.program_id(0)
    programs_together = ROW_TILES_TOGETHER * num_output_tiles
    first_row_tile = program // programs_together * ROW_TILES_TOGETHER
    num_together = min(num_row_tiles - first_row_tile, ROW_TILES_TOGETHER)
    row_tile = first_row_tile + program % programs_together % num_together
    return row_tile * TILE_ROWS, program % programs_together // num_together * TILE_OUTPUTS


@triton.jit
def store_tile(products, bias_ptr, out_ptr, out_stride, rows, is_row, outputs, is_output):
    """products: float32 [outputs, rows]; out: [rows, outputs], any float; bias: float32 or None."""
    if bias_ptr is not None:
        products += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)[:, None]
    places = rows[None, :].to(tl.int64) * out_stride + outputs[:, None]
    tl.store(out_ptr + places, products.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
