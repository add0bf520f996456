"""The pool: 25 % of memory, at most 4 GiB, at least one context; all numbers in every refusal."""

from __future__ import annotations

import pytest
import torch
from tiny import BASE, random_tensors

from chatkv.engine.kv_layout import KVLayout
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.planner import PoolTooSmallError, cpu_weight_bytes, machine_memory_bytes, plan_pool

GIB = 1 << 30
DEFAULT = KVLayout(30, 3, 64, torch.float32)


def test_a_block_is_one_aligned_image() -> None:
    assert DEFAULT.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    for head_dim in (10, 16, 64, 80, 96, 128):
        for num_kv_heads in (1, 3, 8):
            layout = KVLayout(5, num_kv_heads, head_dim, torch.float32)
            assert layout.block_bytes % 4096 == 0
            assert layout.block_bytes % (16 * head_dim * 4) == 0
            assert 0 <= layout.block_bytes - layout.used_bytes < 4096 * 16 * head_dim * 4


def test_views_cover_the_pool_block_by_block() -> None:
    layout = KVLayout(2, 3, 10, torch.float32)
    pool = layout.new_pool(4, torch.device("cpu")).zero_()
    kv = layout.views(pool)
    assert kv.shape == (4, 2, 2, 3, 16, 10)
    kv[2].fill_(1.0)
    assert pool[2].count_nonzero() > 0
    assert all(pool[block].count_nonzero() == 0 for block in (0, 1, 3))
    assert kv[2].is_contiguous()


@pytest.mark.parametrize(("memory_gib", "pool_gib"), [(8, 2), (16, 4), (64, 4)])
def test_share_of_memory(memory_gib: int, pool_gib: int) -> None:
    plan = plan_pool(DEFAULT, 8192, weight_bytes=GIB // 2, memory_bytes=memory_gib * GIB)
    assert plan.pool_bytes <= pool_gib * GIB < plan.pool_bytes + plan.block_bytes
    assert f"{plan.num_blocks} blocks" in plan.explanation
    assert "at most 4 GiB" in plan.explanation


def test_one_context_at_least() -> None:
    plan = plan_pool(DEFAULT, 8192, weight_bytes=GIB // 2, memory_bytes=1 * GIB + GIB // 4)
    assert plan.num_blocks == 512
    assert "one context" in plan.explanation


def test_a_set_size_is_used() -> None:
    plan = plan_pool(DEFAULT, 2048, weight_bytes=0, memory_bytes=64 * GIB, pool_bytes=GIB)
    assert plan.num_blocks == GIB // DEFAULT.block_bytes
    assert "as set" in plan.explanation


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(PoolTooSmallError, match=r"8192 tokens takes 360 MiB.*at most \d+ tokens"):
        plan_pool(DEFAULT, 8192, weight_bytes=900 << 20, memory_bytes=GIB)
    with pytest.raises(PoolTooSmallError, match=r"set to 100 MiB.*at most 2272 tokens"):
        plan_pool(DEFAULT, 8192, weight_bytes=0, memory_bytes=64 * GIB, pool_bytes=100 << 20)
    limit = 100 << 20
    assert plan_pool(DEFAULT, 2272, weight_bytes=0, memory_bytes=64 * GIB, pool_bytes=limit).pool_bytes <= limit


def test_machine_memory_is_plausible() -> None:
    assert 1 << 28 < machine_memory_bytes() < 1 << 46


def test_loaded_weights_are_float32() -> None:
    config = ModelConfig.from_hf(BASE | {"architectures": ["LlamaForCausalLM"]})
    assert cpu_weight_bytes(config) == 4 * sum(t.numel() for t in random_tensors(config).values())
