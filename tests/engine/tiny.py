"""Small random models, and ways to run them: shared by the tests of models and of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chatkv.engine.batch import NO_SLOT, Batch, SampleSpec, ScheduledSequence
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder, WeightFacts
from chatkv.engine.models.names import tensor_shapes
from chatkv.engine.quant.formats import PackedTensor
from chatkv.engine.request import SamplingParams, TokenLogprob
from chatkv.kernels import KernelChoice
from chatkv.kernels.tile_layout import tile
from chatkv.kernels.weights import GROUP_SIZE, FpWeight, Int4Weight, Int8Weight

BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


class GreedySampler:
    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]
    ) -> list[tuple[int, TokenLogprob | None]]:
        assert len(logits) == len(specs)
        return [(int(token), None) for token in logits.argmax(-1)]


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Hugging Face names -> float32 tensors, large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        spread = 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        tensors[name] = torch.randn(shape, generator=generator) * spread + (1.0 if "norm" in name else 0.0)
    return tensors


def packed(tensor: Tensor) -> PackedTensor:
    return FpWeight(tensor) if tensor.dim() == 2 else tensor


def decoder_of(
    hf_config: dict[str, Any], tensors: dict[str, Tensor] | None = None, *, kv_dtype: str = "auto"
) -> Decoder:
    """On the torch path: its weights are floats."""
    config = ModelConfig.from_hf(hf_config)
    tensors = random_tensors(config) if tensors is None else tensors
    facts = WeightFacts("0" * 64, "fp32")
    return Decoder(config, lambda name: packed(tensors[name]), facts, KernelChoice(), kv_dtype=kv_dtype)


def tiled_decoder_of(
    hf_config: dict[str, Any],
    weight_format: str,
    choice: KernelChoice | None = None,
    tensors: dict[str, Tensor] | None = None,
    *,
    kv_dtype: str = "auto",
) -> Decoder:
    """On the native kernels, if `choice` does not say otherwise: its matrices are quantised."""
    config = ModelConfig.from_hf(hf_config)
    tensors = random_tensors(config) if tensors is None else tensors
    facts = WeightFacts("0" * 64, weight_format)

    def read(name: str) -> PackedTensor:
        tensor = tensors[name]
        return tile(quantised(tensor, weight_format)) if tensor.dim() == 2 else tensor

    return Decoder(config, read, facts, choice or KernelChoice(), kv_dtype=kv_dtype)


def quantised(matrix: Tensor, weight_format: str) -> Int4Weight | Int8Weight:
    """ "int8", "int4" or "int4-affine", nearest quanta."""
    groups = matrix.unflatten(1, (-1, GROUP_SIZE))
    largest = groups.abs().amax(-1)
    if weight_format == "int8":
        scales = (largest / 127).half()
        return Int8Weight((groups / scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scales)
    if weight_format == "int4":
        scales, minimums = (largest / 7).half(), None
        columns = groups / scales.float().unsqueeze(-1) + 8
    else:
        minimums = groups.amin(-1).half()
        scales = ((groups.amax(-1) - minimums.float()) / 15).half()
        columns = (groups - minimums.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    quanta = columns.round().clamp(0, 15).to(torch.uint8)
    return Int4Weight(quanta[..., :16] | quanta[..., 16:] << 4, scales, minimums)


KINDS = ("torch fp32", "torch int8", "native fp16", "native int8")
"""Kernels and KV dtype."""


def decoder_of_kind(kind: str, hf_config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Decoder:
    """One of KINDS."""
    kernels, kv_dtype = kind.split()
    if kernels == "torch":
        return decoder_of(hf_config, tensors, kv_dtype=kv_dtype)
    return tiled_decoder_of(hf_config, "int8", tensors=tensors, kv_dtype=kv_dtype)


def runner_of(model: Decoder, num_blocks: int = 160) -> ModelRunner:
    runner = ModelRunner(model, num_blocks, GreedySampler())
    # Fresh memory is often zero; what lies in unwritten slots must not matter. All bits set are NaN, of any width.
    runner.pool.fill_(0xFF)
    return runner


def sequence(
    token_ids: Sequence[int], start: int, block_table: Sequence[int], samples: int = 0, *, is_stored: bool = True
) -> ScheduledSequence:
    """Tokens at positions start, start + 1, ...; `samples` greedy draws from the last row."""
    positions = range(start, start + len(token_ids))
    slots = [block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE if is_stored else NO_SLOT for p in positions]
    spec = SampleSpec(SamplingParams(temperature=0.0), 0, positions.stop, (), ())
    used = block_table[: (positions.stop - 1) // BLOCK_SIZE + 1]
    return ScheduledSequence("request", tuple(token_ids), start, tuple(used), tuple(slots), (spec,) * samples)


def logits_of(runner: ModelRunner, *sequences: ScheduledSequence) -> list[Tensor]:
    """Logits of every row, per sequence."""
    lengths = [len(s.token_ids) for s in sequences]
    return list(runner.all_logits(Batch(sequences)).split(lengths))


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
