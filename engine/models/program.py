"""A model's config and tensors as a program that kernels run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from chatkv.kernels.program import (
    Attend,
    Embed,
    Gate,
    Linear,
    Norm,
    Program,
    ProgramOp,
    Register,
    RotateAndStore,
    Select,
    Take,
)
from chatkv.kernels.weights import Weight

from ..quant.formats import PackedTensor
from .config import ModelConfig
from .names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix

TensorReader: TypeAlias = Callable[[str], PackedTensor]


def program_of(config: ModelConfig, read: TensorReader) -> Program:
    """`read` gives each packed tensor by its Hugging Face name; it is not used afterwards."""
    return Program(
        ops=tuple(_ops(config, read)),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inverse_frequencies=config.rope.inverse_frequencies(config.head_dim),
        attention_factor=config.rope.attention_factor,
    )


def _ops(config: ModelConfig, read: TensorReader) -> Iterator[ProgramOp]:
    table = _matrix(read, EMBEDDING)
    yield Embed(Register.HIDDEN, table)
    for layer in range(config.num_layers):
        yield from _layer_ops(config, layer, read)
    yield Select(Register.HIDDEN, Register.SELECTED)
    yield Norm(Register.SELECTED, _vector(read, FINAL_NORM), config.rms_norm_eps, is_fine=True)
    yield Linear(Register.LOGITS, (table if config.is_head_tied else _matrix(read, HEAD),), None)


def _layer_ops(config: ModelConfig, layer: int, read: TensorReader) -> Iterator[ProgramOp]:
    prefix, eps = layer_prefix(layer), config.rms_norm_eps

    def linear(target: Register, *modules: str, has_bias: bool, is_added: bool = False) -> Linear:
        weights = tuple(_matrix(read, f"{prefix}{module}.weight") for module in modules)
        biases = [_vector(read, f"{prefix}{module}.bias") for module in modules] if has_bias else []
        return Linear(target, weights, torch.cat(biases) if has_bias else None, is_added)

    def norm(name: str) -> Norm:
        return Norm(Register.HIDDEN, _vector(read, f"{prefix}{name}.weight"), eps, is_fine=True)

    def qk_norm() -> Tensor:
        q, k = (_vector(read, f"{prefix}self_attn.{part}_norm.weight") for part in ("q", "k"))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield norm("input_layernorm")
    yield linear(Register.HEADS, *attention, has_bias=config.has_qkv_bias)
    yield RotateAndStore(
        Register.HEADS, layer, qk_norm() if config.has_qk_norm else None, eps, config.layer_ropes[layer]
    )
    yield Attend(Register.HEADS, Register.ATTENDED, layer, config.layer_windows[layer])
    yield Take(Register.ATTENDED)
    yield linear(Register.HIDDEN, "self_attn.o_proj", has_bias=config.has_output_bias, is_added=True)
    yield norm("post_attention_layernorm")
    yield linear(Register.GATE_UP, "mlp.gate_proj", "mlp.up_proj", has_bias=config.has_mlp_bias)
    yield Gate(Register.GATE_UP)
    yield linear(Register.HIDDEN, "mlp.down_proj", has_bias=config.has_mlp_bias, is_added=True)


def _matrix(read: TensorReader, name: str) -> Weight:
    tensor = read(name)
    assert not isinstance(tensor, Tensor), f"{name} must be a matrix"
    return tensor


def _vector(read: TensorReader, name: str) -> Tensor:
    tensor = read(name)
    assert isinstance(tensor, Tensor), f"{name} must be a vector"
    return tensor.to(torch.float32, copy=True)
