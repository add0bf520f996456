"""Tiles of products with one row: all threads side by side along the columns where there are enough of them."""

from __future__ import annotations

from typing import NamedTuple

from .runtime import ceil_div

WASTE_ALLOWED = 1.07
"""Columns of the tiles over columns of the matrix."""


class GemvTile(NamedTuple):
    outputs: int
    """A thread works on four of them, so that an activation's conversion serves four weights."""
    blocks: int
    """Of 32 columns, a step of the loop."""
    num_warps: int = 4


TILES = (GemvTile(4, 128), GemvTile(8, 64), GemvTile(16, 32))


def gemv_tile(num_blocks: int) -> GemvTile:
    """The widest that wastes little on the end of a row."""

    def waste(tile: GemvTile) -> float:
        return ceil_div(num_blocks, tile.blocks) * tile.blocks / num_blocks

    return next((tile for tile in TILES if waste(tile) <= WASTE_ALLOWED), min(TILES, key=waste))
