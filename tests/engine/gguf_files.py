"""Writes small GGUF files as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from chatkv.engine.models.gguf_config import PERMUTED, gguf_name


def pairs_from_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """The converter's own reordering of q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    split = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    file: Path,
    arch: str,
    hf_config: dict[str, Any],
    tensors: dict[str, Tensor],
    type_name: str = "F32",
    *,
    rope_factors: Tensor | None = None,
) -> None:
    """Matrices in `type_name`, vectors in F32."""
    writer = GGUFWriter(file, arch)
    writer.add_block_count(hf_config["num_hidden_layers"])
    writer.add_context_length(hf_config["max_position_embeddings"])
    writer.add_embedding_length(hf_config["hidden_size"])
    writer.add_feed_forward_length(hf_config["intermediate_size"])
    writer.add_head_count(hf_config["num_attention_heads"])
    writer.add_head_count_kv(hf_config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf_config["rms_norm_eps"])
    writer.add_rope_freq_base(hf_config["rope_parameters"]["rope_theta"])
    if "head_dim" in hf_config:
        writer.add_key_length(hf_config["head_dim"])
    writer.add_token_list([f"t{i}" for i in range(hf_config["vocab_size"])])
    kind = GGMLQuantizationType[type_name]
    for name, tensor in tensors.items():
        heads = {"q_proj": hf_config["num_attention_heads"], "k_proj": hf_config["num_key_value_heads"]}
        projection = next((p for p in heads if f".{p}." in name), None)
        if arch in PERMUTED and projection:
            tensor = pairs_from_halves(tensor, heads[projection])
        values = tensor.numpy().astype(np.float32)
        if tensor.dim() == 2 and type_name in ("Q4_0", "Q4_1", "Q8_0", "BF16"):
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        elif tensor.dim() == 2 and type_name == "F16":
            writer.add_tensor(gguf_name(name), values.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), values)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantised(values: Tensor, type_name: str) -> Tensor:
    """What the gguf package says a packed matrix holds."""
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    return torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind).astype(np.float32))
