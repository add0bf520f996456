"""The registry: in what the architectures of the Llama family differ. Everything else is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """What cannot be read from config.json because the model's own code says it."""

    model_type: str
    has_qkv_bias: bool = False
    """Always, whatever the config says."""
    reads_attention_bias: bool = False
    """`attention_bias` puts biases on q, k, v and o."""
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    is_head_tied: bool = False
    """When the config does not say."""
    head_dim: int | None = None
    """When the config does not say and hidden_size / num_heads would be wrong."""
    has_window_switch: bool = False
    """`sliding_window` counts only with `use_sliding_window`, and only in some layers."""
    has_window: bool = False
    """`sliding_window` counts in every layer."""
    has_ropeless_layers: bool = False

    def layer_ropes(self, config: dict[str, Any]) -> tuple[bool, ...]:
        num_layers = int(config["num_hidden_layers"])
        if not self.has_ropeless_layers:
            return (True,) * num_layers
        listed = config.get("no_rope_layers")
        if listed is None:
            interval = int(config.get("no_rope_layer_interval") or 4)
            return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
        # The name misleads: 1 stands for a layer with RoPE.
        return tuple(bool(flag) for flag in listed[:num_layers])

    def layer_windows(self, config: dict[str, Any]) -> tuple[int | None, ...]:
        num_layers = int(config["num_hidden_layers"])
        window = config.get("sliding_window")
        if window is not None and self.has_window:
            return (int(window),) * num_layers
        if window is None or not self.has_window_switch or not config.get("use_sliding_window"):
            return (None,) * num_layers
        kinds = config.get("layer_types")
        if kinds is not None:
            return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:num_layers])
        if self.has_ropeless_layers:
            return tuple(None if has_rope else int(window) for has_rope in self.layer_ropes(config))
        first = int(config.get("max_window_layers", 28))
        return tuple(int(window) if layer >= first else None for layer in range(num_layers))


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Architecture("mistral", has_window=True),
    "Qwen2ForCausalLM": Architecture("qwen2", has_qkv_bias=True, has_window_switch=True),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", reads_attention_bias=True, has_qk_norm=True, head_dim=128, has_window_switch=True
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        reads_attention_bias=True,
        reads_mlp_bias=True,
        is_head_tied=True,
        has_window_switch=True,
        has_ropeless_layers=True,
    ),
}
