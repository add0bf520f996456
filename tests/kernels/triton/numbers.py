"""Random numbers, pools and closeness, for tests of kernels."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from chatkv.kernels.kv_blocks import KVBlocks

COMPUTE_DTYPES = [torch.float16, torch.bfloat16]
KV_DTYPES = [torch.float16, torch.bfloat16, torch.int8, torch.uint8]
"""uint8 holds e4m3fn."""
HEAD_SIZES = [64, 80, 96, 128, 256]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest difference, over the largest number of the reference."""
BLOCK_SIZE = 16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of `dtype`, relative to the largest number expected."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    error = (got.double() - expected.double()).abs().max()
    limit = TOLERANCES[dtype] * expected.double().abs().max()
    assert error <= limit, f"off by {error:.3g}, {limit:.3g} allowed"


def zero_blocks(
    dtype: torch.dtype, head_dim: int, num_blocks: int = 3, num_layers: int = 2, num_kv_heads: int = 2
) -> KVBlocks:
    """Blocks laid out as the engine's pool: K and V of a layer side by side, scales behind all numbers."""
    row_bytes = head_dim * dtype.itemsize + (4 if dtype in (torch.int8, torch.uint8) else 0)
    num_bytes = 2 * num_layers * num_kv_heads * BLOCK_SIZE * row_bytes
    pool = torch.zeros(num_blocks, num_bytes, dtype=torch.uint8)
    return blocks_of(pool, dtype, head_dim, num_layers, num_kv_heads)


def blocks_of(pool: Tensor, dtype: torch.dtype, head_dim: int, num_layers: int = 2, num_kv_heads: int = 2) -> KVBlocks:
    """Views of uint8 [num_blocks, block_bytes]."""
    heads = (num_layers, 2, num_kv_heads, BLOCK_SIZE)
    num_bytes = math.prod(heads) * head_dim * dtype.itemsize
    keys, values = pool[:, :num_bytes].view(dtype).unflatten(1, (*heads, head_dim)).unbind(2)
    if dtype not in (torch.int8, torch.uint8):
        return KVBlocks(keys, values)
    scales = pool[:, num_bytes : num_bytes + 4 * math.prod(heads)].view(torch.float32)
    return KVBlocks(keys, values, *scales.unflatten(1, heads).unbind(2))


def sparse_bytes(*shape: int) -> Tensor:
    """uint8 zeros that take memory only where they are touched: for offsets beyond 2^31."""
    map_noreserve = 0x4000  # of Linux; the module has no name for it
    memory = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
