"""What a model computes in a step, as data: operations over registers, in order, with the weights that they use.

A register holds float32 rows, one per token of the step (or per selected row). Beside the registers there is one set of
activations, which `Norm`, `Take` and `Gate` write and `Linear` multiplies. Every operation's specification is in
`reference.py` or `reference_attention.py`; executors differ in how they round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from torch import Tensor

from .weights import Weight, num_bytes


class Register(IntEnum):
    HIDDEN = 0
    """[T, hidden_size]: what the layers add to."""
    HEADS = 1
    """[T, (num_heads + 2 * num_kv_heads) * head_dim]: q, k and v side by side."""
    ATTENDED = 2
    """[T, num_heads * head_dim]"""
    GATE_UP = 3
    """[T, 2 * intermediate_size]: gate and up side by side."""
    SELECTED = 4
    """[num_selected, hidden_size]"""
    LOGITS = 5
    """[num_selected, vocab_size]"""


@dataclass(frozen=True, slots=True)
class Embed:
    """target = the tokens' rows of the table."""

    target: Register
    table: Weight


@dataclass(frozen=True, slots=True)
class Norm:
    """activations = rms_norm(source)."""

    source: Register
    weight: Tensor
    """float32 [n]"""
    eps: float
    is_fine: bool = False
    """Executors that round activations to 8 bits keep 15 of these."""


@dataclass(frozen=True, slots=True)
class Take:
    """activations = source."""

    source: Register


@dataclass(frozen=True, slots=True)
class Gate:
    """activations = silu_mul(source)."""

    source: Register


@dataclass(frozen=True, slots=True)
class Linear:
    """target = activations times the matrices, side by side, plus bias; or that added to the target."""

    target: Register
    weights: tuple[Weight, ...]
    """Matrices [N_i, K]."""
    bias: Tensor | None
    """float32 [sum N_i]"""
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class RotateAndStore:
    """q and k in the register are normed and rotated in place; then k and v go to the rows' slots in the pool."""

    heads: Register
    layer: int
    norm: Tensor | None
    """float32 [num_heads + num_kv_heads, head_dim]: QK-norm, one row per query head, then one per KV head."""
    eps: float
    has_rope: bool


@dataclass(frozen=True, slots=True)
class Attend:
    """target = attention of the queries in `heads` over what the pool holds of their sequences."""

    heads: Register
    target: Register
    layer: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Select:
    """target = the selected rows of source; from here on rows are those. Which rows of source are finite is told."""

    source: Register
    target: Register


ProgramOp: TypeAlias = Embed | Norm | Take | Gate | Linear | RotateAndStore | Attend | Select


@dataclass(frozen=True, slots=True)
class Program:
    """One decoder."""

    ops: Sequence[ProgramOp]
    """One of them is a `Select`; the logits are in `Register.LOGITS` in the end."""
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inverse_frequencies: Tensor
    """float32 [head_dim / 2]: radians per position."""
    attention_factor: float
    """Multiplies cos and sin."""

    @property
    def scale(self) -> float:
        """Of queries."""
        return self.head_dim**-0.5

    def width(self, register: Register) -> int:
        """Numbers in a row."""
        return {
            Register.HIDDEN: self.hidden_size,
            Register.HEADS: (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
            Register.ATTENDED: self.num_heads * self.head_dim,
            Register.GATE_UP: 2 * self.intermediate_size,
            Register.SELECTED: self.hidden_size,
            Register.LOGITS: self.vocab_size,
        }[register]

    @property
    def matrices(self) -> list[Weight]:
        """Every matrix once, also one that is table and head at the same time."""
        found: dict[int, Weight] = {}
        for op in self.ops:
            weights = (op.table,) if isinstance(op, Embed) else op.weights if isinstance(op, Linear) else ()
            found |= {id(weight): weight for weight in weights}
        return list(found.values())

    @property
    def table_bytes(self) -> int:
        """What embedding tables take that are not multiplied with too."""
        multiplied = {id(weight) for op in self.ops if isinstance(op, Linear) for weight in op.weights}
        tables = [op.table for op in self.ops if isinstance(op, Embed)]
        return sum(num_bytes(table) for table in tables if id(table) not in multiplied)

    @property
    def num_params(self) -> int:
        """Numbers in all matrices; vectors do not count."""
        return sum(math.prod(weight.shape) for weight in self.matrices)
