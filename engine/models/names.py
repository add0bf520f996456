"""The tensors that a model must have, by their Hugging Face names."""

from __future__ import annotations

from .config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names within a layer -> shapes."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.has_qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q_size), ("k", kv_size), ("v", kv_size))}
    if config.has_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.has_mlp_bias:
        shapes |= {f"mlp.{p}_proj.bias": (n,) for p, n in (("gate", inner), ("up", inner), ("down", hidden))}
    if config.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model -> its shape."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if config.has_untied_head:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes
