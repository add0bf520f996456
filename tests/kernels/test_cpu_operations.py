"""The CPU backend computes what `kernels/reference.py` and `kernels/reference_attention.py` say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels import OPERATIONS, backend_for, reference, reference_attention
from chatkv.kernels.cpu import CpuBackend
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, Weight, select_rows

NUM_KV_HEADS, GROUP, HEAD_DIM, NUM_LAYERS, NUM_BLOCKS = 2, 3, 16, 2, 90


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    backend = CpuBackend()
    backend.seal(NUM_KV_HEADS * GROUP, NUM_KV_HEADS, HEAD_DIM)
    return backend


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random_weights(generator: torch.Generator, num_rows: int, num_groups: int) -> dict[str, Weight]:
    def half() -> Tensor:
        return torch.randn(num_rows, num_groups, generator=generator).half()

    int8 = torch.randint(-128, 128, (num_rows, num_groups, 32), generator=generator, dtype=torch.int8)
    int4 = torch.randint(0, 256, (num_rows, num_groups, 16), generator=generator, dtype=torch.uint8)
    values = torch.randn(num_rows, num_groups * 32, generator=generator)
    return {
        "fp32": FpWeight(values),
        "fp16": FpWeight(values.half()),
        "bf16": FpWeight(values.bfloat16()),
        "int8": Int8Weight(int8, half()),
        "int4": Int4Weight(int4, half()),
        "int4-affine": Int4Weight(int4, half(), half()),
        "int4-one-group": Int4Weight(int4.view(num_rows, 1, -1), half()[:, :1].float(), half()[:, :1].float()),
        "fp8": Fp8Weight(int8.flatten(1).clamp(max=126).view(torch.uint8) & 0xF7, half()[:, 0].float()),
    }


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8", "int4", "int4-affine", "int4-one-group", "fp8"])
def test_linear_and_embedding_in_every_format(backend: CpuBackend, generator: torch.Generator, name: str) -> None:
    weight = random_weights(generator, 50, 3)[name]
    assert weight.shape == (50, 96)
    matrix = reference.dequantise(weight)
    assert matrix.shape == (50, 96)
    x, bias = torch.randn(7, 96, generator=generator), torch.randn(100, generator=generator)
    own = CpuBackend()
    prepared = own.prepare_linear([weight, weight], bias)
    own.seal(2, 2, 16)
    found = own.linear(x, prepared)
    expected = torch.cat([reference.linear(x, weight)] * 2, dim=1) + bias
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    ids = torch.tensor([3, 49, 3, 0])
    assert torch.equal(backend.embedding(ids, weight), matrix[ids])
    assert torch.equal(reference.dequantise(select_rows(weight, ids)), matrix[ids])


def test_int4_layout_is_low_half_then_high_half() -> None:
    quanta = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) | (torch.arange(16, dtype=torch.uint8).flip(0) << 4)
    scales, minimums = torch.tensor([[2.0]]).half(), torch.tensor([[-3.0]]).half()
    columns = torch.cat((torch.arange(16), torch.arange(15, -1, -1))).float()
    assert torch.equal(reference.dequantise(Int4Weight(quanta, scales))[0], 2 * (columns - 8))
    assert torch.equal(reference.dequantise(Int4Weight(quanta, scales, minimums))[0], 2 * columns - 3)
    wide = Int4Weight(quanta.repeat_interleave(2, dim=2), scales, minimums)
    assert torch.equal(reference.dequantise(wide)[0], 2 * columns.repeat_interleave(2) - 3)


def test_fp8_bytes_are_e4m3fn() -> None:
    numbers = torch.tensor([[0x00, 0x80, 0x38, 0xB8, 0x01, 0x08, 0x7E]], dtype=torch.uint8)
    expected = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-9, 2.0**-6, 448.0])
    assert torch.equal(reference.dequantise(Fp8Weight(numbers, torch.tensor([3.0])))[0], 3 * expected)
    assert reference.dequantise(Fp8Weight(numbers | 0x7F, torch.ones(1))).isnan().all()


def test_rows_one_by_one_give_the_same_products(generator: torch.Generator) -> None:
    """What runs where no row count keeps its bits."""
    weight = FpWeight(torch.randn(40, 64, generator=generator))
    x = torch.randn(9, 64, generator=generator)
    own = CpuBackend()
    prepared = own.prepare_linear([weight])
    own.seal(2, 2, 16)
    own._linears.row_multiple = None
    assert str(own.numerics()["linear"]).endswith("single-rows")
    found = own.linear(x, prepared)
    torch.testing.assert_close(found, x @ weight.values.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(own.linear(x[4:5], prepared), found[4:5])


def test_rms_norm(backend: CpuBackend, generator: torch.Generator) -> None:
    x, weight = torch.randn(5, 96, generator=generator), torch.randn(96, generator=generator)
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5))
    heads, scales = torch.randn(5, 4, 16, generator=generator), torch.randn(4, 16, generator=generator)
    found = backend.rms_norm(heads, scales, 1e-6)
    torch.testing.assert_close(found[:, 2], F.rms_norm(heads[:, 2], (16,), scales[2], 1e-6))


def test_silu_mul(backend: CpuBackend, generator: torch.Generator) -> None:
    x = torch.randn(5, 14, generator=generator) * 30
    torch.testing.assert_close(backend.silu_mul(x), F.silu(x[:, :7]) * x[:, 7:])
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert torch.equal(backend.silu_mul(extreme), torch.tensor([[0.0, 200.0]]))


def test_rope_turns_pairs_by_their_angle(backend: CpuBackend) -> None:
    angles = torch.tensor([[0.3, 1.2]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    found = backend.rope(x, angles.cos(), angles.sin())[0, 0]
    for pair in (0, 1):
        turned = complex(x[0, 0, pair], x[0, 0, pair + 2]) * complex(angles[0, pair].cos(), angles[0, pair].sin())
        assert complex(found[pair], found[pair + 2]) == pytest.approx(turned, rel=1e-6)


@pytest.fixture(params=["fp32", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pool_of(generator: torch.Generator, kv_dtype: str) -> KVBlocks:
    layout = KVLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, kv_dtype)
    kv = layout.views(layout.new_pool(NUM_BLOCKS, torch.device("cpu")))
    numbers = torch.randn(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, 16, HEAD_DIM, generator=generator)
    # Rows of very different sizes, so that a row read with another's scale is far off.
    numbers *= 4 ** torch.randn(numbers.shape[:-1], generator=generator).unsqueeze(-1)
    parts = ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
    for (pool, pool_scales), part in zip(parts, numbers.unbind(2), strict=True):
        if pool_scales is None:
            pool.copy_(part)
        else:
            quanta, scales = reference.quantise_rows(part)
            pool.copy_(quanta)
            pool_scales.copy_(scales)
    return kv


def views_of(kv: KVBlocks) -> list[Tensor]:
    return [view for view in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if view is not None]


def copy_of(kv: KVBlocks) -> KVBlocks:
    return KVBlocks(*(view.clone() for view in views_of(kv)))


def assert_same_bits(found: KVBlocks, expected: KVBlocks) -> None:
    assert all(torch.equal(*pair) for pair in zip(views_of(found), views_of(expected), strict=True))


SPANS = {
    "decode": [(1, 0), (1, 15), (1, 16), (1, 255), (1, 256), (1, 700)],
    "first chunk": [(40, 0)],
    "later chunk": [(70, 230)],
    "long chunk": [(300, 301)],
    "mixed": [(1, 300), (33, 16), (1, 5), (2, 0), (1, 600)],
}


@pytest.mark.parametrize("window", [None, 1, 20, 257, 500])
@pytest.mark.parametrize("case", SPANS)
def test_paged_attention(
    backend: CpuBackend, generator: torch.Generator, case: str, window: int | None, kv_dtype: str
) -> None:
    kv = pool_of(generator, kv_dtype)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    spans, used = [], 0
    for num_rows, start in SPANS[case]:
        num_blocks = -(-(start + num_rows) // 16)
        spans.append(SequenceSpan(num_rows, start, [order[(used + i) % NUM_BLOCKS] for i in range(num_blocks)]))
        used += num_blocks
    num_rows = sum(span.num_rows for span in spans)
    queries = torch.randn(num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    plan = backend.plan_step(kv, torch.full((num_rows,), -1), spans)
    for layer in range(NUM_LAYERS):
        found = backend.paged_attention(plan, layer, queries, 0.4, window)
        expected = reference_attention.paged_attention(queries, kv, layer, spans, 0.4, window)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_long_sequences_are_gathered_in_pieces(
    backend: CpuBackend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    kv = pool_of(generator, kv_dtype)
    spans = [SequenceSpan(200, 900, [i % NUM_BLOCKS for i in range(69)]), SequenceSpan(1, 800, range(51))]
    queries = torch.randn(201, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    found = []
    for limit in (1 << 30, 2 * NUM_KV_HEADS * 256 * HEAD_DIM * 4 * 2, 1):
        monkeypatch.setattr("chatkv.kernels.cpu.attention.MAX_GATHERED_BYTES", limit)
        plan = backend.plan_step(kv, torch.full((201,), -1), spans)
        found += [backend.paged_attention(plan, 1, queries, 0.4, window) for window in (None, 300)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[1], found[5])


def test_kv_write_skips_rows_without_a_slot(backend: CpuBackend, generator: torch.Generator, kv_dtype: str) -> None:
    kv = pool_of(generator, kv_dtype)
    expected = copy_of(kv)
    slots = torch.tensor([37, -1, 16 * 5, 16 * 5 + 1, NUM_BLOCKS * 16 - 1])
    keys, values = (torch.randn(5, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    plan = backend.plan_step(kv, slots, [SequenceSpan(5, 0, [5])])
    for layer in range(NUM_LAYERS):
        backend.kv_write(plan, layer, keys, values)
        reference_attention.kv_write(expected, layer, keys, values, slots)
    assert_same_bits(kv, expected)
    if kv.key_scales is None:
        assert torch.equal(kv.keys[2, 1, :, 5], keys[0])
    else:
        stored = reference.dequantise_rows(kv.keys[2, 1, :, 5], kv.key_scales[2, 1, :, 5])
        assert ((stored - keys[0]).abs() <= 0.5001 * kv.key_scales[2, 1, :, 5].unsqueeze(-1)).all()


def test_every_listed_operation_has_a_specification() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(reference, name) or hasattr(reference_attention, name) or name == "sample", name


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="tpu"):
        backend_for("tpu")
