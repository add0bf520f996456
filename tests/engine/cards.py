"""Ten models and six cards: shapes as their makers publish them, and memory as a desktop leaves it."""

from __future__ import annotations

from chatkv.engine.models.config import ModelConfig
from chatkv.kernels.device_facts import Card

GIB = 1 << 30
MIB = 1 << 20
LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))


def _config(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_head_tied: bool,
) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": [architecture],
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "tie_word_embeddings": is_head_tied,
        }
    )


MODELS = {
    "SmolLM2-135M": _config(LLAMA, 49152, 576, 1536, 30, 9, 3, 64, True),
    "Llama-3.2-1B": _config(LLAMA, 128256, 2048, 8192, 16, 32, 8, 64, True),
    "Llama-3.2-3B": _config(LLAMA, 128256, 3072, 8192, 28, 24, 8, 128, True),
    "Qwen3-4B": _config(QWEN3, 151936, 2560, 9728, 36, 32, 8, 128, True),
    "Llama-3.1-8B": _config(LLAMA, 128256, 4096, 14336, 32, 32, 8, 128, False),
    # Gemma itself is not among the architectures that chatkv runs; its wide heads and large table are worth a row.
    "shaped like Gemma-3-12B": _config(LLAMA, 262144, 3840, 15360, 48, 16, 8, 256, True),
    "Qwen2.5-14B": _config(QWEN2, 152064, 5120, 13824, 48, 40, 8, 128, False),
    "Mistral-Small-24B": _config(MISTRAL, 131072, 5120, 32768, 40, 32, 8, 128, False),
    "Qwen3-32B": _config(QWEN3, 151936, 5120, 25600, 64, 64, 8, 128, False),
    "Llama-3.3-70B": _config(LLAMA, 128256, 8192, 28672, 80, 64, 8, 128, False),
}


def _card(name: str, capability: tuple[int, int], total_gib: int, has_display: bool | None) -> Card:
    return Card(0, name, capability, total_gib * GIB, total_gib * GIB - GIB // 2, has_display)


CARDS = {
    8: _card("RTX 3050", (8, 6), 8, True),
    12: _card("RTX 3060", (8, 6), 12, True),
    16: _card("RTX 4060 Ti", (8, 9), 16, True),
    24: _card("RTX 4090", (8, 9), 24, True),
    32: _card("RTX 5090", (12, 0), 32, None),
    80: _card("H100", (9, 0), 80, False),
}
"""By GiB; half a GiB of each is in use by others."""
