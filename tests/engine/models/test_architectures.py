"""Every architecture gives the logits of transformers in float32, within 1e-4 of the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import BASE, decoder_of, logits_of, random_ids, random_tensors, runner_of, sequence

from chatkv.engine.models.config import ModelConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-multi-head": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 6},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama-head-dim": {"architectures": ["LlamaForCausalLM"], "head_dim": 32},
    "llama-biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"architectures": ["LlamaForCausalLM"], "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5, "tie_word_embeddings": True},
    "smollm3-listed-layers": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 50,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "rope_parameters": YARN_ROPE},
    "qwen2-window": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-biases": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": True},
}


def reference_logits(hf_config: dict[str, Any], tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    import transformers

    name = hf_config["architectures"][0]
    fields = {key: value for key, value in hf_config.items() if key != "architectures"}
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(
        **fields, attn_implementation="eager", pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    model = getattr(transformers, name)(config).eval()
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    hf_config = BASE | CASES[case]
    tensors = random_tensors(ModelConfig.from_hf(hf_config))
    ids = random_ids(300, hf_config["vocab_size"])
    expected = reference_logits(hf_config, tensors, ids)
    runner = runner_of(decoder_of(hf_config, tensors))
    (whole,) = logits_of(runner, sequence(ids, 0, range(20)))
    largest = expected.abs().max()
    assert (whole - expected).abs().max() < 1e-4 * largest
    assert largest > 1
