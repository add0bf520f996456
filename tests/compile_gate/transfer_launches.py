"""Moves of blocks within the pool."""

from __future__ import annotations

import torch

from chatkv.kernels.triton.transfer import gather_blocks, scatter_blocks, zero_blocks

BLOCK_BYTES = 4096


def launch_transfers() -> None:
    pool = torch.zeros(8, BLOCK_BYTES, dtype=torch.uint8)
    block_ids = torch.zeros(3, dtype=torch.int32)
    images = torch.zeros(3, BLOCK_BYTES, dtype=torch.uint8)
    gather_blocks(pool, block_ids, images)
    scatter_blocks(pool, block_ids, images)
    zero_blocks(pool, block_ids)
