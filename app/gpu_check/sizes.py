"""How large the things are that are measured: as people run them on a card, or tiny ones in a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

ComputeDtype: TypeAlias = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Sizes:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Of the model whose decode step is measured."""
    vocab_size: int
    num_rows: int
    """Of a prefill chunk."""
    matrix_rows: int
    """Of the activations that are multiplied in 8 bits."""
    num_images: int
    """Blocks that are copied between device and host."""
    kv_dtypes: tuple[str, ...]
    compute_dtypes: tuple[ComputeDtype, ...]

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


CARD = Sizes(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_sequences=8,
    context_tokens=8192,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    vocab_size=128_256,
    num_rows=4096,
    matrix_rows=4096,
    num_images=512,
    kv_dtypes=("bf16", "fp16", "fp8", "int8"),
    compute_dtypes=("bf16", "fp16"),
)
"""Shapes of an 8B model."""

DRY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_sequences=2,
    context_tokens=48,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    vocab_size=211,
    num_rows=4,
    matrix_rows=16,
    num_images=4,
    kv_dtypes=("bf16", "fp16", "fp8", "int8"),
    compute_dtypes=("bf16", "fp16"),
)
"""For the interpreter."""
