"""What the engine launches, in every form that it can have: models of one layer whose steps run on nothing.

Tensors lie in the CPU's memory and kernels do nothing, so the numbers mean nothing; shapes, dtypes, strides and
alignment are those of real steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from chatkv.app.gpu_check.random_model import llama_config, random_decoder
from chatkv.app.gpu_check.sizes import CARD
from chatkv.engine.models.decoder import Decoder
from chatkv.kernels import KernelChoice
from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan

from .cards import Card
from .random_weights import FORMATS, weight_of
from .sampling_launches import launch_sampling
from .transfer_launches import launch_transfers

LANES = ("fast", "all")
NUM_BLOCKS = 64
NUM_CACHED = 20
STEPS = ([1], [1] * 3, [1] * 16, [40, 1, 7], [300])
"""Rows of each sequence."""
SMALL = {"num_hidden_layers": 1, "intermediate_size": 1024, "vocab_size": 1000}
HEADS = ((9, 3, 64), (8, 8, 80), (8, 1, 96), (14, 2, 128), (8, 4, 256))
"""Query heads, KV heads, head_dim."""
WIDTHS = (576, 1024, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Case:
    weight_format: str = "int4-affine"
    compute_dtype: Literal["bf16", "fp16"] = "bf16"
    kv_dtype: str = "bf16"
    is_deterministic: bool = False
    has_fp8_activations: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    """What differs from an 8B Llama."""

    @property
    def name(self) -> str:
        kind = "deterministic" if self.is_deterministic else "fp8 x fp8" if self.has_fp8_activations else ""
        other = " ".join(f"{key}={value}" for key, value in self.config.items())
        return ", ".join(filter(None, (self.weight_format, self.compute_dtype, f"{self.kv_dtype} KV", kind, other)))


def launches(card: Card, lane: str) -> Iterator[str]:
    """Runs case after case; gives its name when its kernels are launched."""
    for case in _fast_cases(card) if lane == "fast" else _all_cases(card):
        _run(case)
        yield case.name
    launch_sampling()
    yield "sampling"
    launch_transfers()
    yield "transfers"


def _fast_cases(card: Card) -> Iterator[Case]:
    yield Case()
    yield Case("int8", "fp16", "int8")
    if card.has_fp8:
        yield Case("fp8", "bf16", "fp8")
        yield Case("fp8", "bf16", "fp8", has_fp8_activations=True)


def _all_cases(card: Card) -> Iterator[Case]:
    """One thing differs at a time."""
    base = Case()
    for compute_dtype in ("bf16", "fp16"):
        for kv_dtype in ("bf16", "fp16", "int8", "fp8"):
            yield replace(base, compute_dtype=compute_dtype, kv_dtype=kv_dtype)
        for weight_format in FORMATS:
            case = replace(base, compute_dtype=compute_dtype, kv_dtype=compute_dtype, weight_format=weight_format)
            yield case
            yield replace(case, is_deterministic=True)
        if card.has_fp8:
            yield replace(base, compute_dtype=compute_dtype, weight_format="fp8", has_fp8_activations=True)
    for num_heads, num_kv_heads, head_dim in HEADS:
        heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
        for kv_dtype in ("bf16", "int8", "fp8"):
            yield replace(base, kv_dtype=kv_dtype, config=heads)
    for hidden_size in WIDTHS:
        yield replace(base, config={"hidden_size": hidden_size})
    yield replace(base, config={"architectures": ["Qwen2ForCausalLM"]})  # biases
    yield replace(base, config={"architectures": ["Qwen3ForCausalLM"]})  # QK-norm
    yield replace(base, config={"architectures": ["MistralForCausalLM"], "sliding_window": 1024})


@torch.inference_mode()
def _run(case: Case) -> None:
    hf_config = llama_config(CARD) | SMALL | case.config
    choice = KernelChoice(
        "interpreter",
        compute_dtype=case.compute_dtype,
        is_deterministic=case.is_deterministic,
        has_fp8_activations=case.has_fp8_activations,
    )
    decoder = random_decoder(hf_config, choice, partial(weight_of, case.weight_format), kv_dtype=case.kv_dtype)
    pool = decoder.layout.new_pool(NUM_BLOCKS, torch.device("cpu"))
    for lengths in STEPS:
        _run_step(decoder, pool, lengths)


def _run_step(decoder: Decoder, pool: torch.Tensor, lengths: list[int]) -> None:
    spans = [SequenceSpan(length, NUM_CACHED, range(1, 2 + (NUM_CACHED + length) // 16)) for length in lengths]
    num_rows = sum(lengths)
    last_rows = torch.tensor(lengths).cumsum(0).sub(1).tolist()
    rows = StepRows([0] * num_rows, list(range(16, 16 + num_rows)), spans, last_rows)
    decoder.run(rows, decoder.layout.views(pool))
