"""GGUF metadata as a Hugging Face config, and GGUF tensor names as Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BrokenModelError, UnsupportedModelError
from .names import EMBEDDING, FINAL_NORM, HEAD

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
PERMUTED = ("llama", "smollm3")
"""GGUF stores q and k of these with RoPE's pairs side by side, where Hugging Face keeps two halves."""
ROPE_FACTORS = "rope_freqs.weight"

_MODEL_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor with this Hugging Face name."""
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] | None
) -> dict[str, Any]:
    """A config.json for a GGUF file with this metadata and these tensors (GGUF names, shapes as rows x columns)."""
    arch = str(metadata.get("general.architecture"))
    if arch not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not one that chatkv runs ({', '.join(GGUF_ARCHITECTURES)}). Choose another."
        )

    def required(key: str) -> Any:
        value = metadata.get(f"{arch}.{key}")
        if value is None:
            raise BrokenModelError(f"The GGUF file lacks {arch}.{key}: it is damaged or incomplete.")
        return value

    def optional(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    if optional("expert_count", 0):
        raise UnsupportedModelError(
            f"Mixtures of experts ({arch} with expert_count) are not supported. Choose another."
        )
    if "token_embd.weight" not in shapes:
        raise BrokenModelError("The GGUF file lacks token_embd.weight: it is damaged or incomplete.")
    num_heads, hidden_size = int(required("attention.head_count")), int(required("embedding_length"))
    head_dim = int(optional("attention.key_length") or optional("rope.dimension_count") or hidden_size // num_heads)
    if int(optional("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModelError(
            "This GGUF rotates only part of a head (rope.dimension_count), which chatkv cannot."
        )
    window = int(optional("attention.sliding_window", 0))
    is_mistral = arch == "llama" and window > 0
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if is_mistral else GGUF_ARCHITECTURES[arch]],
        "model_type": "mistral" if is_mistral else arch,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": int(required("feed_forward_length")),
        "num_hidden_layers": int(required("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(optional("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(required("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(required("context_length")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "rope_parameters": _rope(arch, metadata, rope_factors),
    }
    return config | ({"sliding_window": window} if is_mistral else {})


def _rope(arch: str, metadata: Mapping[str, Any], factors: tuple[float, ...] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_theta": float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_type": "default",
    }
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise UnsupportedModelError(f"RoPE scaling {kind!r} together with {ROPE_FACTORS} is not supported.")
        return rope | {"rope_type": "factors", "factors": list(factors)}
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": float(metadata.get(f"{arch}.rope.scaling.factor", 1.0))}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    return rope | ({"original_max_position_embeddings": int(original)} if original else {})
