"""A model on the native kernels: against the same arithmetic in torch, and against itself bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from invariance_checks import check_invariance
from tiny import BASE, logits_of, random_ids, runner_of, sequence, tiled_decoder_of
from torch import Tensor

from chatkv.engine.models.decoder import Decoder
from chatkv.kernels import KernelChoice
from chatkv.kernels.cpu import CpuBackend
from chatkv.kernels.cpu.backend import CpuPlan
from chatkv.kernels.cpu.linear import CpuLinear
from chatkv.kernels.cpu.native.abi import TILE
from chatkv.kernels.cpu.native.library import native_library
from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.weights import GROUP_SIZE
from tests.kv_compare import compare, mix_scales_of_positions

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qk-norm, heads of 32": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rms_norm_eps": 1e-6},
    "biases, groups of 2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 3},
    "one KV head": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1},
    "window": {"architectures": ["MistralForCausalLM"], "sliding_window": 140},
    "layers without rope, tied head": {
        "architectures": ["SmolLM3ForCausalLM"],
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
}
FORMATS = ("int8", "int4", "int4-affine")
TORCH = KernelChoice(cpu_kernels="torch")
NUM_TOKENS = 200


class QuantisingBackend(CpuBackend):
    """Rounds what the native kernels round: activations to 8 bits, or 15 after a norm, K and V to 16."""

    _normed = torch.empty(0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._normed = super().rms_norm(x, weight, eps)
        return self._normed

    def linear(self, x: Tensor, prepared: CpuLinear) -> Tensor:
        num_steps = 127 * 254 if x is self._normed else 127
        groups = x.unflatten(1, (-1, GROUP_SIZE))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / num_steps
        return super().linear(((groups / scales).round() * scales).flatten(1), prepared)

    def kv_write(self, plan: CpuPlan, layer: int, keys: Tensor, values: Tensor) -> None:
        super().kv_write(plan, layer, keys.half().float(), values.half().float())


def whole_logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    (logits,) = logits_of(runner_of(model, 40), sequence(ids, 0, range(20)))
    return logits


def first_logits(model: Decoder, ids: Sequence[int]) -> list[Tensor]:
    """Of each token, at the start of a text."""
    return logits_of(runner_of(model, 40), *(sequence([token], 0, [block]) for block, token in enumerate(ids[:12])))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).std() / expected.std())


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_torch_with_the_same_rounding(
    name: str, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ids = BASE | MODELS[name], random_ids(NUM_TOKENS, 211)
    model = tiled_decoder_of(config, weight_format)
    assert model.kernels.startswith("native")
    found, found_alone = whole_logits(model, ids), first_logits(model, ids)
    plain = whole_logits(tiled_decoder_of(config, weight_format, TORCH), ids)
    monkeypatch.setattr("chatkv.kernels.CpuBackend", QuantisingBackend)
    rounded = tiled_decoder_of(config, weight_format, TORCH)
    expected, expected_alone = whole_logits(rounded, ids), first_logits(rounded, ids)
    # Here and there a last bit of a sum, and so a quantum, is rounded the other way. Not for all tokens.
    assert min(map(relative_error, found_alone, expected_alone)) < 1e-4
    assert relative_error(found, expected) < 0.02
    assert 0.01 < relative_error(found, plain) < 0.04, "8 bits cost something, and little"


@pytest.mark.parametrize("name", MODELS)
def test_8_bits_of_k_and_v_say_nearly_the_same(name: str) -> None:
    models = [tiled_decoder_of(BASE | MODELS[name], "int8", kv_dtype=kv_dtype) for kv_dtype in ("fp16", "int8")]
    plain, int8 = (runner_of(model, 20) for model in models)
    ids = random_ids(NUM_TOKENS, 211)
    assert compare(plain, int8, ids).divergence.mean() < 5e-3
    assert compare(plain, int8, ids, mix_scales_of_positions).divergence.mean() > 5e-3


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_batches_and_hits_keep_every_bit(name: str, kv_dtype: str, threads: int) -> None:
    model = tiled_decoder_of(BASE | MODELS[name], "int4-affine", KernelChoice(num_threads=threads), kv_dtype=kv_dtype)
    check_invariance(runner_of(model, num_blocks=480), random_ids(560, 211, seed=3))


def test_threads_and_instruction_sets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, found = random_ids(300, 211), []
    for variant in native_library().variants:
        for threads in (1, 2, 4):
            model = tiled_decoder_of(BASE | MODELS["llama"], "int4", KernelChoice(num_threads=threads))
            model.executor._variant = variant
            found.append(whole_logits(model, ids))
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_places_outside_the_pool_are_refused_before_anything_is_written_there() -> None:
    model = tiled_decoder_of(BASE | MODELS["llama"], "int8")
    kv = model.layout.views(model.layout.new_pool(2, torch.device("cpu")))
    for block_id, slot in ((2, 0), (-1, 0), (0, 2 * TILE)):
        with pytest.raises(AssertionError, match="not in the pool"):
            model.run(StepRows([1], [slot], [SequenceSpan(1, 0, [block_id])], [0]), kv)
    with pytest.raises(IndexError, match="token id"):
        model.run(StepRows([211], [0], [SequenceSpan(1, 0, [0])], [0]), kv)


def test_threads_can_be_changed_between_steps() -> None:
    model, ids = tiled_decoder_of(BASE | MODELS["llama"], "int8"), random_ids(60, 211)
    expected = whole_logits(model, ids)
    for num_threads in (3, 1, 2):
        model.set_num_threads(num_threads)
        assert f"{num_threads} thread" in model.kernels
        assert torch.equal(whole_logits(model, ids), expected)
