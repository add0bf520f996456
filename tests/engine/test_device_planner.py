"""What is planned for a card: ten models on six cards, checked against sums made by hand, and what must always hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.device_buffers import Buffers, row_bytes
from chatkv.engine.device_planner import DeviceDemand, DevicePlan, allocate_pool, plan_device
from chatkv.engine.planner import PoolTooSmallError
from chatkv.engine.quant.formats import PackedTensor
from chatkv.engine.weight_options import BF16, float_options, is_packed, option_in, stored_option
from chatkv.kernels.device_facts import Card
from chatkv.kernels.tile_layout import tile
from chatkv.kernels.weights import FpWeight, Int4Weight
from tests.engine.cards import CARDS, GIB, MIB, MODELS

HAND = {
    "SmolLM2-135M": "bf16 17008|bf16 28268|bf16 39220|bf16 61124|bf16 83027|bf16 227702",
    "Llama-3.2-1B": "bf16 7553|bf16 15470|bf16 23171|bf16 38572|bf16 53973|bf16 155697",
    "Llama-3.2-3B": "int8 1626|bf16 2221|bf16 4421|bf16 8821|bf16 13222|bf16 42286",
    "Qwen3-4B": "int4-g32 1568|int8 2643|bf16 2731|bf16 6154|bf16 9576|bf16 32182",
    "Llama-3.1-8B": "int4-g128 723|int4-g32 2386|fp8 3043|bf16 3037|bf16 6887|bf16 32318",
    "shaped like Gemma-3-12B": "needs 11.0|int4-g128 570|int4-g128 1212|fp8 1681|fp8 2965|bf16 9552",
    "Qwen2.5-14B": "needs 11.3|int4-g128 550|int4-g64 1700|fp8 2401|fp8 4967|bf16 17184",
    "Mistral-Small-24B": "needs 15.4|needs 15.5|needs 15.7|int4-g32 2686|fp8 2537|bf16 13782",
    "Qwen3-32B": "needs 20.9|needs 21.0|needs 21.2|int4-g128 969|int4-g32 2186|bf16 4159",
    "Llama-3.3-70B": "needs 40.6|needs 40.8|needs 41.0|needs 41.5|needs 42.0|fp8 2323",
}
"""Weight format and blocks of the pool, or the GiB that one context would need: on 8, 12, 16, 24, 32 and 80 GiB, for
8,192 tokens, with K and V in 16 bits. By hand, for each cell:

    free      total - 0.5 GiB
    reserve   max(600 MiB, 6 % of total), 256 MiB on the H100, on which nothing is drawn
    CUDA      448 MiB of context and 192 MiB of modules: 0.625 GiB
    buffers   (MiB, column 3 below)
    weights   layers (column 1, billions, from the makers' counts) at 16, 8, 8.5, 5, 4.5 or 4.25 bits in bf16, fp8, int8
              and int4 with a scale and a minimum of 16 bits for 32, 64, 128 of them; tables (column 2) at 16 bits in
              bf16, else at 8.5; and 1/64 and 32 MiB of rounding
    pool      what is left / (16 tokens x 2 x layers x KV heads x head size x 2 bytes); KiB a token in column 4

    SmolLM2-135M   0.107  0.028  167   22.5       shaped like Gemma  10.759  1.007  370  384
    Llama-3.2-1B   0.973  0.263  237   32         Qwen2.5-14B        13.213  1.557  314  192
    Llama-3.2-3B   2.819  0.394  255  112         Mistral-Small-24B  22.230  1.342  362  160
    Qwen3-4B       3.633  0.389  279  144         Qwen3-32B          31.206  1.556  379  256
    Llama-3.1-8B   6.979  1.051  288  128         Llama-3.3-70B      68.453  2.101  398  320

The format is the first of bf16, fp8, int8, int4 (below 8.9: int8 before fp8) that leaves 8,192 + 8 x 2,048 tokens =
1,536 blocks; else int4-g128. Llama-3.1-8B on 12 GiB: 12 - 0.5 - 0.72 - 0.625 - 0.281 = 9.874 GiB for weights and pool.
bf16 14.956 GiB is too much; int8 8.03e9 x 8.5 bits = 7.946 GiB, + 1/64 + 32 MiB = 8.101, leaves 1.773 GiB = 907 blocks
of 2 MiB; fp8 7.540 -> 7.689, leaves 1,118; int4-g32 6.979e9 x 5 bits + 1.051e9 x 8.5 = 5.102 -> 5.213, leaves 4.661 GiB
= 2,386.
"""
ROUNDING = 0.003
"""Of the hand's blocks: counts of weights are rounded to millions, buffers to MiB."""
NAMES = {"int8": "int8-g32", **{f"int4-g{group}": f"int4-affine-g{group}" for group in (32, 64, 128)}}
CELLS = [(model, gib, cell) for model, row in HAND.items() for gib, cell in zip(CARDS, row.split("|"), strict=True)]


def demand(model: str = "Llama-3.1-8B", tokens: int = 8192, kv_dtype: str = "bf16", **options: int) -> DeviceDemand:
    return DeviceDemand(MODELS[model], tokens, kv_dtype, **options)


def planned(model: str, card: Card, **options: int) -> DevicePlan:
    return plan_device(demand(model, **options), float_options(MODELS[model], card.capability), card)


@pytest.mark.parametrize(("model", "gib", "cell"), CELLS)
def test_ten_models_on_six_cards(model: str, gib: int, cell: str) -> None:
    expected, figure = cell.split()
    card = CARDS[gib]
    if expected == "needs":
        with pytest.raises(PoolTooSmallError) as refused:
            planned(model, card)
        said = str(refused.value)
        assert f"{card.name} has too little memory: one context of 8,192 tokens takes " in said
        assert abs(float(said.partition(" GiB together")[0].rpartition(" ")[2]) - float(figure)) < 0.11
        assert f"{gib - 0.5:.1f} GiB of {gib:.1f} GiB are free." in said
        return
    plan = planned(model, card)
    assert plan.weight_format == NAMES.get(expected, expected)
    assert abs(plan.num_blocks - int(figure)) <= max(4, ROUNDING * int(figure))
    assert plan.total_bytes <= card.free_bytes < plan.total_bytes + plan.block_bytes
    assert plan.num_blocks >= plan.demand.context_blocks


def test_buffers_of_llama_8b_by_hand() -> None:
    config, buffers = MODELS["Llama-3.1-8B"], Buffers()
    # hidden in float32; normed, added, q k v, attended, gate and up, their product in 16 bits; the widest in 8.
    row = 4 * 4096 + 2 * (4096 + 4096 + 6144 + 4096 + 28672 + 14336) + 14336
    assert row_bytes(config) == row == 153_600
    assert buffers.activation_bytes(config) == 512 * row == 75 * MIB
    assert buffers.sampling_bytes(config) == 32 * (128256 * 14 + 16032)
    splits = 32 * 16 * (128 + 2) * 4  # heads, splits of 512 positions, sum and two scores, float32
    assert buffers.attention_bytes(config, 8192) == 32 * splits == 8.125 * MIB
    assert buffers.attention_bytes(config, 8193) == 32 * splits * 17 // 16
    assert buffers.angle_bytes(config, 8192) == 4 * MIB
    # Five sizes for contexts of 2,048 and 8,192 tokens; 32 layers of 12 launches of 4 KiB; 16 rows of everything.
    graphs = 10 * (2 * MIB + 1.5 * MIB) + 32 * MIB + 16 * (row + 4 * 128256 + splits)
    assert buffers.graph_bytes(config, 8192) == graphs
    assert abs(buffers.num_bytes(config, 8192) / MIB - (75 + 55.3 + 8.1 + 4 + 81.2 + 64)) < 0.1


def test_weights_of_one_matrix_after_another_by_hand() -> None:
    config = MODELS["Llama-3.2-1B"]
    layer = 2048 * (2048 + 512 + 512) + 2048 * 2048 + 3 * 2048 * 8192
    norms = (2 * 16 + 1) * 2048 * 4
    table = 128256 * 2048
    by_name = {option.weight_format: option for option in float_options(config, (8, 9))}
    assert by_name["bf16"].num_bytes == 2 * (16 * layer + table) + norms
    rows = 2048 + 512 + 512 + 2048 + 2 * 8192 + 2048
    assert by_name["fp8"].num_bytes == 16 * (layer + 4 * rows) + table * 34 // 32 + norms
    assert by_name["int4-affine-g64"].num_bytes == 16 * layer * 36 // 64 + table * 34 // 32 + norms
    assert list(by_name) == ["bf16", "fp8", "int4-affine-g32", "int4-affine-g64", "int4-affine-g128"]
    assert [option.weight_format for option in float_options(config, (8, 6))][1:3] == ["int8-g32", "fp8"]


def test_nothing_is_made_on_disk_of_weights_that_only_become_16_bits_wide() -> None:
    specs = {option.weight_format: option.spec for option in float_options(MODELS["Llama-3.2-1B"], (8, 9))}
    assert specs["bf16"] is None
    assert all(spec is not None and spec.name == name for name, spec in specs.items() if name != "bf16")


def test_groups_fall_back_where_columns_do_not_divide() -> None:
    # 576 columns are 4.5 groups of 128: those matrices have groups of 64, the others of 128.
    options = {o.weight_format: o.num_bytes for o in float_options(MODELS["SmolLM2-135M"], (8, 9))}
    narrow = 576 * (576 + 192 + 192) + 576 * 576 + 2 * 576 * 1536
    saved = options["int4-affine-g64"] - options["int4-affine-g128"]
    assert saved == 30 * (1536 * 576 // 64 - 1536 * 576 // 128) * 4
    assert options["int4-affine-g64"] > 30 * narrow * 36 // 64


def test_formats_that_are_unpacked_to_be_multiplied_need_room_for_that() -> None:
    config, card = MODELS["Llama-3.1-8B"], CARDS[24]
    (nf4,) = float_options(config, card.capability, "nf4")
    assert nf4.scratch_bytes == 12 * 14336 * 4096
    plain = plan_device(demand(), float_options(config, card.capability, "int4")[:1], card)
    assert plan_device(demand(), [nf4], card).buffer_bytes - plain.buffer_bytes == nf4.scratch_bytes


def stored() -> list[PackedTensor]:
    packed = Int4Weight(torch.zeros(24, 2, 16, dtype=torch.uint8), *(torch.zeros(24, 2).half() for _ in range(2)))
    return [FpWeight(torch.zeros(48, 64)), packed, tile(packed), torch.zeros(64)]


def test_packed_weights_are_counted_as_they_lie() -> None:
    # A table of floats becomes 16 bits wide; 48 groups of 16 + 4 bytes, once as tiles with 8 rows of padding.
    option = stored_option("int4-affine-g32", stored())
    assert option.num_bytes == 48 * 64 * 2 + 2 * 48 * 20 + 64 * 4
    assert option.spec is None
    assert is_packed("int4-affine-g32")
    assert not any(map(is_packed, ("bf16", "fp16", "fp32")))


def test_a_single_option_is_kept_whatever_it_leaves() -> None:
    card = CARDS[16]
    config = MODELS["Llama-3.1-8B"]
    (fp8,) = float_options(config, card.capability, "fp8")
    tight = replace(card, free_bytes=fp8.num_bytes + 3 * GIB + GIB // 2)
    plan = plan_device(demand(), [fp8], tight)
    assert plan.weight_format == "fp8"
    assert plan.demand.context_blocks <= plan.num_blocks < plan.demand.roomy_blocks
    assert "too much beside eight chats" not in plan.explanation


def test_the_explanation_says_what_was_done_and_what_it_costs() -> None:
    assert planned("Llama-3.1-8B", CARDS[12]).explanation == (
        "Weights in int4-affine-g32, 5.1 GiB (5.5 bits each; 4 bits cost some quality; fp8 would take 7.5 GiB, too "
        "much beside eight chats). KV cache: 2,385 blocks of 16 tokens in bf16, 4.7 GiB, room for 38,160 tokens or 4 "
        'full contexts; 737 MiB of 12.0 GiB stay free for other programs. With kv_dtype = "int8" there would be room '
        "for weights in int8-g32."
    )
    plain = planned("Llama-3.2-1B", CARDS[24]).explanation
    assert plain.startswith("Weights in bf16, 2.3 GiB (16.0 bits each). KV cache: ")
    assert "int8" not in plain


def test_eight_bit_kv_is_named_only_where_it_makes_the_difference() -> None:
    card, options = CARDS[12], float_options(MODELS["Llama-3.1-8B"], (8, 6))
    assert "room for weights in int8-g32" in plan_device(demand(), options, card).explanation
    in_8_bits = plan_device(demand(kv_dtype="int8"), options, card)
    assert in_8_bits.weight_format == "int8-g32", "as the hint promised"
    assert "kv_dtype" not in in_8_bits.explanation
    # 24 B on 16 GiB lacks 0.2 GiB for a context of 1.25 GiB in 16 bits.
    with pytest.raises(PoolTooSmallError, match=r'It fits with kv_dtype = "int8"\.'):
        planned("Mistral-Small-24B", CARDS[16])
    assert planned("Mistral-Small-24B", CARDS[16], kv_dtype="int8").num_blocks >= 512


def refusal(model: str, card: Card, **options: int) -> str:
    with pytest.raises(PoolTooSmallError) as refused:
        planned(model, card, **options)
    return str(refused.value)


def test_a_refusal_names_what_would_fit_and_that_does_fit() -> None:
    said = refusal("Llama-3.1-8B", CARDS[12], tokens=131072)
    tokens = int(said.partition("A context of ")[2].partition(" tokens fits")[0].replace(",", ""))
    assert tokens > 32768
    assert planned("Llama-3.1-8B", CARDS[12], tokens=tokens).num_blocks * 16 >= tokens
    assert "one context of 131,072 tokens takes 16.0 GiB in bf16" in said
    assert 'device = "cpu" runs it on the CPU.' in said
    said = refusal("Llama-3.3-70B", CARDS[24])
    assert "A model of about 35.8 billion weights fits in int4-affine-g128." in said
    assert "A context of" not in said


def test_a_refusal_names_other_programs_the_reserve_and_other_formats() -> None:
    busy = replace(CARDS[12], free_bytes=6 * GIB)
    assert "Other programs hold 6.0 GiB: closing them may give room." in refusal("Llama-3.1-8B", busy)
    assert "closing" not in refusal("Llama-3.3-70B", busy)
    plan = planned("Llama-3.1-8B", CARDS[12])
    nearly = replace(CARDS[8], free_bytes=planned("Llama-3.1-8B", CARDS[8]).needed_bytes - 100 * MIB)
    said = refusal("Llama-3.1-8B", nearly)
    lowered = int(said.partition("gpu_reserve_bytes of at most ")[2].partition(" MiB")[0])
    assert 495 <= lowered <= 500
    assert planned("Llama-3.1-8B", nearly, reserve_bytes=lowered * MIB).num_blocks == 512
    config = MODELS["Llama-3.1-8B"]
    with pytest.raises(PoolTooSmallError, match=r'It fits with weight_format = "auto"\.'):
        plan_device(demand(), [option_in(config, BF16)], CARDS[12], float_options(config, (8, 6)))
    assert plan.num_blocks > 512


def test_a_set_pool_and_a_set_reserve_are_honoured() -> None:
    config, card = MODELS["Llama-3.1-8B"], CARDS[16]
    options = float_options(config, card.capability)
    plan = plan_device(demand(pool_bytes=2 * GIB), options, card)
    assert (plan.num_blocks, plan.weight_format) == (1024, "fp8"), "less pool, so finer weights have room"
    assert "2.0 GiB (as set)" in plan.explanation
    assert (
        plan_device(demand(reserve_bytes=0), options, card).num_blocks > plan_device(demand(), options, card).num_blocks
    )
    with pytest.raises(PoolTooSmallError, match=r"set to 512 MiB.*takes 1.0 GiB in bf16.*at most 4,096 tokens"):
        plan_device(demand(pool_bytes=GIB // 2), options, card)
    huge = plan_device(demand(pool_bytes=64 * GIB), options, card)
    assert huge.total_bytes <= card.free_bytes, "a pool that is set too large shrinks instead of failing"
    assert "as set" not in huge.explanation


def test_what_stays_free_depends_on_the_desktop() -> None:
    for has_display, reserve in ((True, 0.06 * 24 * GIB), (None, 0.06 * 24 * GIB), (False, 256 * MIB)):
        plan = planned("Llama-3.1-8B", replace(CARDS[24], has_display=has_display))
        assert plan.reserve_bytes == int(reserve)
    assert planned("Llama-3.2-1B", CARDS[8]).reserve_bytes == 600 * MIB


def test_a_context_that_was_made_before_the_measure_is_not_counted_twice() -> None:
    card = CARDS[24]
    inside = planned("Llama-3.1-8B", replace(card, has_context=True))
    outside = planned("Llama-3.1-8B", card)
    assert (inside.num_blocks - outside.num_blocks) * inside.block_bytes == 448 * MIB


class Memory:
    """A card's free memory while others use it too: the pool can be had while it is there."""

    def __init__(self, free_bytes: int, largest_piece: int | None = None) -> None:
        self.free_bytes = free_bytes
        self.largest_piece = free_bytes if largest_piece is None else largest_piece
        self.asked: list[int] = []
        self.on_ask: Callable[[], None] = lambda: None

    def allocate(self, num_blocks: int) -> int:
        self.asked.append(num_blocks)
        self.on_ask()
        if num_blocks * 2 * MIB > min(self.free_bytes, self.largest_piece):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return num_blocks

    def plan(self) -> tuple[DevicePlan, int]:
        return allocate_pool(planned("Llama-3.1-8B", CARDS[24]), lambda: self.free_bytes, self.allocate)


REST = 288 * MIB + 192 * MIB + int(0.06 * 24 * GIB)
"""Buffers, modules and the reserve, which the pool leaves free."""


def test_the_pool_is_what_is_free_once_the_weights_are_loaded() -> None:
    memory = Memory(8 * GIB)
    plan, allocated = memory.plan()
    assert memory.asked == [plan.num_blocks] == [allocated]
    assert abs(plan.num_blocks - (8 * GIB - REST) // (2 * MIB)) <= 1
    assert plan.total_bytes <= 8 * GIB
    assert f"{plan.num_blocks:,} blocks" in plan.explanation


def test_a_pool_that_another_program_made_impossible_shrinks() -> None:
    memory = Memory(8 * GIB)

    def take() -> None:
        memory.on_ask = lambda: None
        memory.free_bytes = memory.largest_piece = 4 * GIB

    memory.on_ask = take
    plan, allocated = memory.plan()
    assert allocated == plan.num_blocks == memory.asked[1] < memory.asked[0]
    assert plan.total_bytes <= 4 * GIB
    torn = Memory(8 * GIB, largest_piece=3 * GIB)
    plan, allocated = torn.plan()
    assert allocated == plan.num_blocks <= 1536
    assert torn.asked == sorted(torn.asked, reverse=True)
    assert len(set(torn.asked)) == len(torn.asked), "no size is tried twice"


def test_one_context_is_the_least_and_then_the_refusal_names_the_program_to_close() -> None:
    least = Memory(8 * GIB, largest_piece=1 * GIB)
    plan, allocated = least.plan()
    assert allocated == plan.num_blocks == 512
    with pytest.raises(
        PoolTooSmallError, match=r"Another program took memory of RTX 4090.*1.0 GiB in bf16.*nvidia-smi"
    ):
        Memory(8 * GIB, largest_piece=GIB - 1).plan()
    with pytest.raises(PoolTooSmallError, match=r"2.0 GiB are free beside the weights, and 2.9 GiB are needed"):
        Memory(2 * GIB).plan()


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_may_end_beyond_torchs_allocator(said: str) -> None:
    def allocate(num_blocks: int) -> int:
        if num_blocks > 600:
            raise RuntimeError(said)
        return num_blocks

    plan, _ = allocate_pool(planned("Llama-3.1-8B", CARDS[24]), lambda: 4 * GIB, allocate)
    assert 512 <= plan.num_blocks <= 600


def test_what_is_no_lack_of_memory_is_raised() -> None:
    def allocate(num_blocks: int) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        allocate_pool(planned("Llama-3.1-8B", CARDS[24]), lambda: 4 * GIB, allocate)


def test_what_failed_is_let_go_before_the_next_try() -> None:
    held: list[int] = []

    class Piece:
        def __init__(self) -> None:
            held.append(1)

        def __del__(self) -> None:
            held.pop()

    def allocate(num_blocks: int) -> int:
        assert not held, "the last try still holds its memory"
        piece = Piece()
        if num_blocks > 600:
            raise torch.OutOfMemoryError(f"CUDA out of memory beside {piece}")
        return num_blocks

    plan, _ = allocate_pool(planned("Llama-3.1-8B", CARDS[24]), lambda: 4 * GIB, allocate)
    assert plan.num_blocks <= 600


amounts = st.integers(0, 96 * GIB)


@given(
    st.sampled_from(list(MODELS)), st.sampled_from(list(CARDS)), amounts, amounts, st.integers(64, 131072), st.data()
)
def test_more_memory_is_never_worse_and_none_is_promised_twice(
    model: str, gib: int, low: int, high: int, tokens: int, data: st.DataObject
) -> None:
    low, high = sorted((low, high))
    kv_dtype = data.draw(st.sampled_from(["bf16", "int8", "fp8"]))
    pool_bytes = data.draw(st.one_of(st.none(), st.integers(1, 64 * GIB)))
    asked = replace(demand(model, tokens, kv_dtype), pool_bytes=pool_bytes)
    options = float_options(MODELS[model], CARDS[gib].capability)
    order = [option.weight_format for option in options]
    plans: list[DevicePlan | None] = []
    for free_bytes in (low, high):
        card = replace(CARDS[gib], total_bytes=96 * GIB, free_bytes=free_bytes)
        try:
            plan = plan_device(asked, options, card)
        except PoolTooSmallError:
            plans.append(None)
            continue
        assert plan.total_bytes <= free_bytes
        assert plan.num_blocks >= asked.context_blocks
        assert pool_bytes is None or plan.pool_bytes <= pool_bytes
        plans.append(plan)
    less, more = plans
    if less is None:
        return
    assert more is not None, "more memory, and it no longer fits"
    assert order.index(more.weight_format) <= order.index(less.weight_format)
    if more.weight_format == less.weight_format:
        assert more.num_blocks >= less.num_blocks
    else:
        assert more.num_blocks >= asked.roomy_blocks, "a finer format was taken, and eight chats lost their room"
