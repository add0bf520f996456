"""Blocks between the pool and a slab: exact bytes, those blocks and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatkv.kernels.triton.transfer import gather_blocks, scatter_blocks, zero_blocks
from tests.kernels.triton.numbers import sparse_bytes

BLOCK_BYTES = [4096, 16384, 20480]
IDS = [[], [0], [6], [3, 0, 6, 2]]


def images(count: int, block_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("ids", IDS)
def test_gathered_blocks_are_the_pools(ids: list[int], block_bytes: int) -> None:
    pool = images(7, block_bytes)
    out = torch.full((len(ids), block_bytes), 255, dtype=torch.uint8)
    assert gather_blocks(pool, torch.tensor(ids, dtype=torch.int32), out) is out
    assert torch.equal(out, pool[ids])


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("ids", IDS)
def test_scattered_blocks_go_where_they_should_and_no_others_change(ids: list[int], block_bytes: int) -> None:
    pool, new = images(7, block_bytes), images(len(ids), block_bytes, seed=1)
    expected = pool.clone()
    expected[ids] = new
    scatter_blocks(pool, torch.tensor(ids, dtype=torch.int32), new)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("ids", IDS)
def test_zeroed_blocks_are_zero_and_no_others_change(ids: list[int], block_bytes: int) -> None:
    pool = images(7, block_bytes)
    expected = pool.clone()
    expected[ids] = 0
    zero_blocks(pool, torch.tensor(ids, dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_a_block_may_be_gathered_twice() -> None:
    pool = images(3, 4096)
    ids = torch.tensor([1, 1], dtype=torch.int32)
    assert torch.equal(gather_blocks(pool, ids, torch.empty(2, 4096, dtype=torch.uint8)), pool[[1, 1]])


def test_what_does_not_fit_is_refused() -> None:
    pool, ids = images(3, 4096), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(AssertionError, match="no multiple of 4096"):
        zero_blocks(images(3, 1000), ids)
    with pytest.raises(AssertionError, match="int32"):
        zero_blocks(pool, ids.long())
    with pytest.raises(AssertionError, match=r"not \[1, 4096\]"):
        scatter_blocks(pool, ids, images(2, 4096))
    with pytest.raises(AssertionError, match="contiguous"):
        gather_blocks(images(3, 8192)[:, :4096], ids, torch.empty(1, 4096, dtype=torch.uint8))


def test_blocks_may_lie_beyond_2_to_the_31_words() -> None:
    block_bytes, last = 1 << 21, 4500
    pool, new = sparse_bytes(last + 1, block_bytes), images(1, block_bytes)
    ids = torch.tensor([last], dtype=torch.int32)
    scatter_blocks(pool, ids, new)
    assert torch.equal(pool[last], new[0])
    assert torch.equal(gather_blocks(pool, ids, torch.zeros_like(new)), new)
    zero_blocks(pool, ids)
    assert not pool[last].any()


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_block_that_the_pool_does_not_have_is_noticed(bad: int) -> None:
    with pytest.raises(Exception, match="out-of-bounds store"):
        zero_blocks(images(3, 4096), torch.tensor([bad], dtype=torch.int32))
