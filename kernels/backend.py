"""What the decoder asks of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from .kv_blocks import KVBlocks
from .reference_attention import SequenceSpan
from .weights import Weight

PreparedLinear: TypeAlias = Any
"""A weight matrix in the form that its backend multiplies with. Only that backend looks inside."""

StepPlan: TypeAlias = Any
"""Index tensors of one step, made once and used by every layer. Only its backend looks inside."""


class Backend(Protocol):
    """One device's operations. T rows of a step; shapes as in `OPERATIONS`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """How K and V can lie in the pool: names that `engine.kv_layout` knows, this backend's default first."""
        ...

    def weight_bytes(self, prepared: PreparedLinear) -> int:
        """What a prepared matrix takes."""
        ...

    def numerics(self) -> dict[str, str | int]:
        """What decides bits beyond the model itself; part of the cache fingerprint. Valid once `seal` has run."""
        ...

    def prepare_linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> PreparedLinear:
        """Matrices [N_i, K] stacked into one [sum N_i, K]; bias float32 [sum N_i]."""
        ...

    def seal(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """All weights are prepared: settle how products are computed, so that rows do not depend on one another."""
        ...

    def plan_step(self, kv: KVBlocks, slots: Tensor, sequences: Sequence[SequenceSpan]) -> StepPlan:
        """kv: views of the pool; slots int64 [T]."""
        ...

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor: ...

    def linear(self, x: Tensor, prepared: PreparedLinear) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def kv_write(self, plan: StepPlan, layer: int, keys: Tensor, values: Tensor) -> None: ...

    def paged_attention(
        self, plan: StepPlan, layer: int, queries: Tensor, scale: float, window: int | None
    ) -> Tensor: ...
