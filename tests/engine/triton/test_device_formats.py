"""Models of every weight format and KV dtype on the GPU's kernels: logits near the reference backend's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from device_models import INTERPRETER, LLAMA, REFERENCE, VOCAB_SIZE, largest_difference, model_of, reference_of
from tiny import logits_of, random_ids, runner_of, sequence
from torch import Tensor

from chatkv.engine.models.decoder import Decoder

IDS = random_ids(40, VOCAB_SIZE, seed=5)


@cache
def expected(weight_format: str, kv_dtype: str = "auto") -> Tensor:
    return logits(reference_of(weight_format, kv_dtype))


def logits(model: Decoder) -> Tensor:
    """A prompt in two chunks, the second over blocks of the first."""
    runner = runner_of(model, 4)
    logits_of(runner, sequence(IDS[:5], 0, [2]))
    return logits_of(runner, sequence(IDS[5:], 5, [2, 0, 1]))[0]


@pytest.mark.parametrize(
    ("weight_format", "tolerance"),
    [("fp16", 0.05), ("int8", 0.05), ("int4", 0.05), ("fp8", 0.05), ("nf4", 0.05), ("int8-bnb", 0.05)],
)
def test_weight_formats(weight_format: str, tolerance: float) -> None:
    model = model_of(weight_format, INTERPRETER)
    assert model.fingerprint_facts()["numerics"]["activation_quantisation"] == "none"
    assert largest_difference(logits(model), expected(weight_format)) < tolerance


def test_fp8_numbers_times_fp8_numbers() -> None:
    """Where the card multiplies them: coarser, and the fingerprint says so."""
    plain, coarse = (model_of("fp8", replace(INTERPRETER, has_fp8_activations=has)) for has in (False, True))
    difference = largest_difference(logits(coarse), expected("fp8"))
    assert 0.05 < difference < 1.0
    assert coarse.fingerprint_facts()["numerics"]["activation_quantisation"] == "e4m3 from 32 rows"
    assert plain.fingerprint_facts()["numerics"] != coarse.fingerprint_facts()["numerics"]
    other_weights = model_of("int8", replace(INTERPRETER, has_fp8_activations=True))
    assert other_weights.fingerprint_facts()["numerics"]["activation_quantisation"] == "none"


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bf16", 0.2), ("int8", 0.1), ("fp8", 1.0)])
def test_kv_dtypes(kv_dtype: str, tolerance: float) -> None:
    """8 bits: against the specification of the same where the reference backend has it, else against float32."""
    model = model_of("int4", INTERPRETER, kv_dtype)
    reference = expected("int4", "int8" if kv_dtype == "int8" else "auto")
    assert largest_difference(logits(model), reference) < tolerance


ARCHITECTURES = {
    "biases": {"architectures": ["Qwen2ForCausalLM"]},
    "norms of q and k": {"architectures": ["Qwen3ForCausalLM"]},
    "a window": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "one table": {"tie_word_embeddings": True},
    "one KV head": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80, "hidden_size": 160},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str) -> None:
    """In chunks, and single rows behind them."""
    hf_config = LLAMA | ARCHITECTURES[kind]
    reference, model = (model_of("int8", each, "auto", hf_config) for each in (REFERENCE, INTERPRETER))
    rows = []
    for each in (reference, model):
        runner = runner_of(each, 4)
        chunk = logits_of(runner, sequence(IDS[:25], 0, [2, 0]), sequence(IDS[:3], 0, [1]))
        rows.append([*chunk, *logits_of(runner, sequence(IDS[25:26], 25, [2, 0]), sequence(IDS[3:4], 3, [1]))])
    assert all(largest_difference(*pair) < 0.05 for pair in zip(*rows, strict=True))


def test_bfloat16() -> None:
    model = model_of("int4", replace(INTERPRETER, compute_dtype="bf16"))
    assert model.layout.kv_dtype == "bf16"
    assert model.fingerprint_facts()["numerics"]["compute_dtype"] == "bf16"
    assert largest_difference(logits(model), expected("int4")) < 0.4
