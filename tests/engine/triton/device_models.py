"""A small random model on the GPU's kernels and on the reference backend, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tiny import BASE, logits_of, quantised, random_ids, random_tensors, runner_of, sequence
from torch import Tensor

from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder, WeightFacts
from chatkv.engine.quant.formats import PackedTensor
from chatkv.engine.quant.quantise import quantise
from chatkv.engine.quant.spec import QuantSpec
from chatkv.kernels import KernelChoice
from chatkv.kernels.weights import FpWeight, Weight

VOCAB_SIZE = 97
LLAMA: dict[str, Any] = BASE | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
REFERENCE = KernelChoice(cpu_kernels="torch")
INTERPRETER = KernelChoice(device="interpreter", compute_dtype="fp16")


@cache
def tensors() -> dict[str, Tensor]:
    return random_tensors(ModelConfig.from_hf(LLAMA))


def model_of(
    weight_format: str, choice: KernelChoice, kv_dtype: str = "auto", hf_config: dict[str, Any] = LLAMA
) -> Decoder:
    """weight_format: as `matrix_of` knows it."""
    config = ModelConfig.from_hf(hf_config)
    numbers = tensors() if hf_config is LLAMA else random_tensors(config)

    def read(name: str) -> PackedTensor:
        tensor = numbers[name]
        if tensor.dim() == 1:
            return tensor
        return matrix_of(tensor, weight_format)

    facts = WeightFacts("0" * 64, weight_format)
    return Decoder(config, read, facts, choice, kv_dtype=kv_dtype)


def matrix_of(matrix: Tensor, weight_format: str) -> Weight:
    match weight_format:
        case "fp16":
            return FpWeight(matrix.half())
        case "int8" | "int4" | "int4-affine":
            return quantised(matrix, weight_format)
        case _:
            return quantise(FpWeight(matrix), QuantSpec(weight_format))


def reference_of(weight_format: str, kv_dtype: str = "auto") -> Decoder:
    return model_of(weight_format, REFERENCE, kv_dtype)


def greedy_answer(model: Decoder, prompt: Sequence[int], num_tokens: int, margin: float) -> list[int] | None:
    """The ids; None when the best logit does not always lead by `margin`."""
    ids = list(prompt)
    runner = runner_of(model, 8)
    for _ in range(num_tokens):
        start = 0 if len(ids) == len(prompt) else len(ids) - 1
        (rows,) = logits_of(runner, sequence(ids[start:], start, range(8)))
        best, second = rows[-1].topk(2).values.tolist()
        if best - second < margin:
            return None
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :]


def clear_prompt(model: Decoder, prefix: Sequence[int], length: int, num_tokens: int, margin: float) -> list[int]:
    """`length` ids that begin with `prefix`, whose greedy answer is never closer than `margin`."""
    for seed in range(1000):
        prompt = [*prefix, *random_ids(length - len(prefix), VOCAB_SIZE, seed)]
        if greedy_answer(model, prompt, num_tokens, margin) is not None:
            return prompt
    raise AssertionError(f"no prompt whose answer is clear by {margin}")


def largest_difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
