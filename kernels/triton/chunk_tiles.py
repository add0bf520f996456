"""How much a program of chunk attention takes at once. Chosen by compiling: nothing here was timed yet."""

from __future__ import annotations

from typing import NamedTuple


class ChunkTile(NamedTuple):
    num_rows: int
    """Of the matrix products: query rows times the heads of a group."""
    num_keys: int
    """Positions that a program reads at once: whole blocks."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread, where the assembler would rather spill."""


SMALL_ROWS = 16
"""Of the small tile: the least that matrix units take."""
TILES = {
    2: {
        64: ChunkTile(64, 64, 4, 3, 255),
        96: ChunkTile(64, 32, 4, 3, 255),
        128: ChunkTile(64, 32, 8, 3),
        256: ChunkTile(64, 32, 8, 3, 255),
    },
    1: {
        64: ChunkTile(64, 64, 4, 3, 255),
        96: ChunkTile(64, 32, 8, 3),
        128: ChunkTile(64, 32, 8, 3),
        256: ChunkTile(64, 32, 8, 3, 255),
    },
}
"""By bytes of a stored number, then by head_dim, rounded up to one of these. Wide heads that are no power of two spill
where 128 does not."""
SMALL_TILES = {
    2: {64: ChunkTile(16, 128, 4, 3, 255), 128: ChunkTile(16, 64, 4, 3, 255), 256: ChunkTile(16, 32, 4, 3, 255)},
    1: {64: ChunkTile(16, 64, 4, 3, 255), 128: ChunkTile(16, 32, 4, 3, 255), 256: ChunkTile(16, 32, 4, 3, 255)},
}
"""The same, where no sequence has more rows than one small tile takes."""


def chunk_tile(number_bytes: int, head_dim: int, *, is_small: bool) -> ChunkTile:
    """number_bytes: of a stored number."""
    tiles = (SMALL_TILES if is_small else TILES)[number_bytes]
    return tiles[min(size for size in tiles if size >= head_dim)]
