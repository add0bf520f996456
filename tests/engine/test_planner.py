"""The pool: 25 % of memory, at most 4 GiB, at least one context; all numbers in every refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chatkv.engine.kv_layout import KVLayout
from chatkv.engine.planner import PoolTooSmallError, machine_memory_bytes, plan_pool
from chatkv.kernels.kv_blocks import KeyOrder

GIB = 1 << 30
DEFAULT = KVLayout(30, 3, 64)
DEFAULT_INT8 = KVLayout(30, 3, 64, "int8")


def test_a_block_is_one_aligned_image() -> None:
    assert DEFAULT.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert DEFAULT_INT8.used_bytes == 30 * 2 * 3 * 16 * (64 + 4)
    for kv_dtype, width in (("fp32", 4), ("fp16", 2), ("int8", 1)):
        for head_dim in (10, 16, 64, 80, 96, 128):
            for num_kv_heads in (1, 3, 8):
                layout = KVLayout(5, num_kv_heads, head_dim, kv_dtype)
                assert layout.block_bytes % 4096 == 0
                assert layout.block_bytes % (16 * head_dim * width) == 0
                assert 0 <= layout.block_bytes - layout.used_bytes < 4096 * 16 * head_dim * width


def test_8_bits_give_nearly_four_times_the_context() -> None:
    assert DEFAULT.block_bytes / DEFAULT_INT8.block_bytes == 3.75
    plans = [
        plan_pool(layout, 2048, weight_bytes=0, memory_bytes=64 * GIB, pool_bytes=GIB)
        for layout in (DEFAULT, DEFAULT_INT8)
    ]
    assert plans[1].num_blocks // plans[0].num_blocks == 3
    assert plans[1].pool_bytes <= GIB
    assert "in int8" in plans[1].explanation
    small = {"weight_bytes": 0, "memory_bytes": 64 * GIB, "pool_bytes": 10 << 20}
    for layout, share in ((DEFAULT, "a quarter"), (replace(DEFAULT, kv_dtype="fp16"), "half")):
        with pytest.raises(PoolTooSmallError, match=f"int8.*little more than {share}"):
            plan_pool(layout, 2048, **small)
    with pytest.raises(PoolTooSmallError) as refusal:
        plan_pool(DEFAULT_INT8, 2048, **small)
    assert "int8" not in str(refusal.value)


def test_facts_name_dtype_and_scale_scheme() -> None:
    assert DEFAULT.facts()["dtype"] == "float32"
    assert DEFAULT.facts()["scales"] is None
    facts = DEFAULT_INT8.facts()
    assert facts["dtype"] == "int8"
    assert facts["scales"] == {
        "dtype": "float32",
        "one_per": ["layer", "k_or_v", "kv_head", "position"],
        "scheme": "symmetric",
        "largest_quantum": 127,
    }
    assert facts["block_bytes"] == DEFAULT_INT8.block_bytes


@pytest.mark.parametrize(("kv_dtype", "name"), [("bf16", "bfloat16"), ("fp8", "float8_e4m3fn")])
def test_facts_of_what_only_gpus_store(kv_dtype: str, name: str) -> None:
    layout = replace(DEFAULT, kv_dtype=kv_dtype)
    scales = layout.facts()["scales"]
    assert layout.facts()["dtype"] == name
    assert (layout.block_bytes, scales is None) == (
        (DEFAULT.block_bytes // 2, True) if kv_dtype == "bf16" else (DEFAULT_INT8.block_bytes, False)
    )
    if scales is not None:
        assert scales["largest_number"] == 448.0
        assert scales != DEFAULT_INT8.facts()["scales"]


def test_numbers_of_a_dtype_lie_in_the_views() -> None:
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtypes |= {"int8": torch.int8, "fp8": torch.uint8}
    for kv_dtype, dtype in dtypes.items():
        layout = KVLayout(2, 3, 16, kv_dtype)
        kv = layout.views(layout.new_pool(2, torch.device("cpu")).zero_())
        assert kv.keys.dtype is kv.values.dtype is dtype
        assert (kv.key_scales is not None) == (kv_dtype in ("int8", "fp8"))


LAYOUTS = [
    ("fp32", "position"),
    ("bf16", "position"),
    ("int8", "position"),
    ("fp8", "position"),
    ("fp16", "dimension"),
    ("int8", "dimension"),
]


@pytest.mark.parametrize(("kv_dtype", "keys_by"), LAYOUTS)
def test_views_cover_the_pool_block_by_block(kv_dtype: str, keys_by: KeyOrder) -> None:
    layout = KVLayout(2, 3, 10, kv_dtype, keys_by)
    pool = layout.new_pool(4, torch.device("cpu")).zero_()
    kv = layout.views(pool)
    assert kv.keys.shape == kv.values.shape == (4, 2, 3, 16, 10)
    views = [view for view in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if view is not None]
    assert len(views) == (4 if kv_dtype in ("int8", "fp8") else 2)
    for number, view in enumerate(views):
        view[2].fill_(number + 1)
        assert all((other[2] == index + 1).all() for index, other in enumerate(views[: number + 1])), "views overlap"
    assert pool[2].count_nonzero() > 0
    assert pool[2, layout.used_bytes :].count_nonzero() == 0
    assert all(pool[block].count_nonzero() == 0 for block in (0, 1, 3))


def test_places_of_numbers_are_those_of_the_named_order() -> None:
    by_position, by_dimension = (KVLayout(2, 3, 16, "fp16", order) for order in ("position", "dimension"))
    for layout in (by_position, by_dimension):
        kv = layout.views(layout.new_pool(2, torch.device("cpu")).zero_())
        kv.keys[1, 1, 2, 5, 3] = 1.0
        kv.values[1, 1, 2, 5, 3] = 2.0
        image = torch.tensor(kv.keys.untyped_storage()[layout.block_bytes :], dtype=torch.uint8).view(torch.float16)
        per_head, key_head, value_head = 16 * 16, (1 * 2 + 0) * 3 + 2, (1 * 2 + 1) * 3 + 2
        key_place = 5 * 16 + 3 if layout is by_position else 3 * 16 + 5
        places = [key_head * per_head + key_place, value_head * per_head + 5 * 16 + 3]
        assert image.nonzero().flatten().tolist() == places
    assert by_position.facts()["layout"] != by_dimension.facts()["layout"]


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
