"""Models of any shape with random weights, made on the device that they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import AUTO, Decoder, WeightFacts
from chatkv.engine.models.names import EMBEDDING, HEAD, tensor_shapes
from chatkv.engine.quant.formats import PackedTensor
from chatkv.kernels import KernelChoice
from chatkv.kernels.weights import Weight

from .sizes import Sizes

MakeMatrix: TypeAlias = Callable[[int, int], Weight]
"""(num_rows, num_columns) -> a weight."""


def llama_config(sizes: Sizes) -> dict[str, Any]:
    """As config.json of a Llama of that shape says it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    }


def random_decoder(
    hf_config: dict[str, Any],
    choice: KernelChoice,
    make: MakeMatrix,
    make_head: MakeMatrix | None = None,
    kv_dtype: str = AUTO,
) -> Decoder:
    """`make_head`: of the table and the head, where they are to be other than the rest."""
    config = ModelConfig.from_hf(hf_config)
    shapes = tensor_shapes(config)

    def read(name: str) -> PackedTensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        return (make_head or make if name in (EMBEDDING, HEAD) else make)(*shape)

    return Decoder(config, read, WeightFacts("0" * 64, "random"), choice, kv_dtype=kv_dtype)
