"""Blocks between the pool and a slab that the copy engines move in one go.

Bytes are moved as int32, 16 bytes a thread and access; an image is a multiple of 4096 bytes, so nothing is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import check_tensor

WORD_BYTES = 4
TILES = (4096, 1024)
"""Words of a program, the first that divides an image: 16 or 4 KiB."""
NUM_WARPS = 4


@triton.jit
def gather_kernel(pool_ptr, block_ids_ptr, out_ptr, block_words: tl.constexpr, tile: tl.constexpr):
    """out[i] = pool[block_ids[i]], int32 words. Programs: images, then tiles."""
    image = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * tile + tl.arange(0, tile)
    block = tl.load(block_ids_ptr + image).to(tl.int64)
    tl.store(out_ptr + image * block_words + words, tl.load(pool_ptr + block * block_words + words))


@triton.jit
def scatter_kernel(images_ptr, block_ids_ptr, pool_ptr, block_words: tl.constexpr, tile: tl.constexpr):
    """pool[block_ids[i]] = images[i], int32 words."""
    image = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * tile + tl.arange(0, tile)
    block = tl.load(block_ids_ptr + image).to(tl.int64)
    tl.store(pool_ptr + block * block_words + words, tl.load(images_ptr + image * block_words + words))


@triton.jit
def zero_kernel(pool_ptr, block_ids_ptr, block_words: tl.constexpr, tile: tl.constexpr):
    """pool[block_ids[i]] = 0, int32 words."""
    words = tl.program_id(1) * tile + tl.arange(0, tile)
    block = tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)
    tl.store(pool_ptr + block * block_words + words, tl.zeros([tile], tl.int32))


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> Tensor:
    """out[i] = pool[block_ids[i]].

    pool: uint8 [num_blocks, block_bytes]; block_ids: int32 [n], on the device, any order, each below num_blocks; out:
    uint8 [n, block_bytes]. Both contiguous; block_bytes a multiple of 4096. Returns `out`.
    """
    grid, block_words, tile = _tiling(pool, block_ids, out)
    if len(block_ids):
        gather_kernel[grid](
            pool.view(torch.int32), block_ids, out.view(torch.int32), block_words, tile, num_warps=NUM_WARPS
        )
    return out


def scatter_blocks(pool: Tensor, block_ids: Tensor, images: Tensor) -> None:
    """pool[block_ids[i]] = images[i]; shapes as in `gather_blocks`. The ids are distinct."""
    grid, block_words, tile = _tiling(pool, block_ids, images)
    if len(block_ids):
        scatter_kernel[grid](
            images.view(torch.int32), block_ids, pool.view(torch.int32), block_words, tile, num_warps=NUM_WARPS
        )


def zero_blocks(pool: Tensor, block_ids: Tensor) -> None:
    """pool[block_ids[i]] = 0; shapes as in `gather_blocks`."""
    grid, block_words, tile = _tiling(pool, block_ids)
    if len(block_ids):
        zero_kernel[grid](pool.view(torch.int32), block_ids, block_words, tile, num_warps=NUM_WARPS)


def _tiling(pool: Tensor, block_ids: Tensor, images: Tensor | None = None) -> tuple[tuple[int, int], int, int]:
    """Grid, words of an image, words of a program."""
    num_images, (num_blocks, block_bytes) = len(block_ids), pool.shape
    block_words = block_bytes // WORD_BYTES
    assert block_bytes % (TILES[-1] * WORD_BYTES) == 0, f"images of {block_bytes} bytes are no multiple of 4096"
    check_tensor("pool", pool, (num_blocks, block_bytes), torch.uint8)
    check_tensor("block_ids", block_ids, (num_images,), torch.int32)
    if images is not None:
        check_tensor("images", images, (num_images, block_bytes), torch.uint8)
    tile = next(tile for tile in TILES if block_words % tile == 0)
    return (num_images, block_words // tile), block_words, tile
