"""The operations of `kernels.OPERATIONS` on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..kv_blocks import KVBlocks
from ..reference_attention import SequenceSpan
from ..weights import Weight, select_rows
from .attention import Chunk, SingleRows
from .bnb_linear import BnbLinear
from .digest import arithmetic_digest
from .linear import CpuLinear, LinearPath
from .pool import PoolRows
from .threads import single_thread
from .tiles import KEY_TILE, TileProducts

SINGLE_THREAD_NUMBERS = 1 << 15
"""Elementwise work below this is done by one thread."""


class CpuPlan:
    """Index tensors of one step. Layers with the same window share theirs."""

    def __init__(self, kv: KVBlocks, slots: Tensor, sequences: Sequence[SequenceSpan], group: int):
        self.pool = PoolRows(kv)
        self.sequences = sequences
        self.group = group
        is_stored = slots >= 0
        self.stored_rows = None if bool(is_stored.all()) else is_stored.nonzero().squeeze(1)
        self.stored_tokens = self.pool.tokens_of(slots if self.stored_rows is None else slots[self.stored_rows])
        self._work: dict[int | None, list[SingleRows | Chunk]] = {}

    def work(self, window: int | None) -> list[SingleRows | Chunk]:
        if window not in self._work:
            self._work[window] = self._plan(window)
        return self._work[window]

    def _plan(self, window: int | None) -> list[SingleRows | Chunk]:
        work: list[SingleRows | Chunk] = []
        singles: list[SequenceSpan] = []
        single_rows: list[int] = []
        row = 0
        for span in self.sequences:
            if span.num_rows == 1:
                singles.append(span)
                single_rows.append(row)
            else:
                work.append(Chunk(self.pool, span, row, self.group, window))
            row += span.num_rows
        if singles:
            work.append(SingleRows(self.pool, singles, single_rows, window))
        return work


class CpuBackend:
    """Implements `kernels.backend.Backend` with torch."""

    device = torch.device("cpu")
    kv_dtypes = ("fp32", "int8")

    def __init__(self) -> None:
        self._linears = LinearPath()
        self._products = TileProducts()
        self._num_threads = 0
        self._head_dim = 0
        self._group = 1
        self._digest = ""

    def numerics(self) -> dict[str, str | int]:
        attention = "tiles" if self._products.row_multiple else "tiles-single-rows"
        return {
            "backend": "cpu-torch",
            "linear": self._linears.name,
            "attention": attention,
            "key_tile": KEY_TILE,
            "compute_dtype": "float32",
            "activation_quantisation": "none",
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "arithmetic": self._digest,
        }

    @property
    def row_multiples(self) -> tuple[int | None, int | None]:
        """Rows that linears and attention products are padded to; None: rows run one by one."""
        return self._linears.row_multiple, self._products.row_multiple

    def prepare_linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> CpuLinear | BnbLinear:
        return self._linears.prepare(weights, bias)

    def weight_bytes(self, prepared: CpuLinear | BnbLinear) -> int:
        return prepared.num_bytes

    def seal(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._measure()

    def plan_step(self, kv: KVBlocks, slots: Tensor, sequences: Sequence[SequenceSpan]) -> CpuPlan:
        if torch.get_num_threads() != self._num_threads:
            self._measure()
        return CpuPlan(kv, slots, sequences, self._group)

    def embedding(self, token_ids: Tensor, weight: Weight) -> Tensor:
        return reference.dequantise(select_rows(weight, token_ids))

    def linear(self, x: Tensor, prepared: CpuLinear | BnbLinear) -> Tensor:
        return self._linears.linear(x, prepared)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return reference.rope(x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        # Not F.silu: its last few numbers go through a scalar exp with other bits, and where they lie depends on the
        # number of rows and threads. torch.exp has one path for all.
        with single_thread(gate_up.numel() <= SINGLE_THREAD_NUMBERS):
            return reference.silu_mul(gate_up)

    def kv_write(self, plan: CpuPlan, layer: int, keys: Tensor, values: Tensor) -> None:
        if plan.stored_rows is not None:
            keys, values = (numbers.index_select(0, plan.stored_rows) for numbers in (keys, values))
        plan.pool.store(layer, plan.stored_tokens, keys, values)

    def paged_attention(self, plan: CpuPlan, layer: int, queries: Tensor, scale: float, window: int | None) -> Tensor:
        scaled = queries * scale
        outputs = torch.empty_like(scaled)
        for part in plan.work(window):
            part.attend(self._products, layer, scaled, outputs)
        return outputs

    def _measure(self) -> None:
        before = self.numerics() if self._num_threads else None
        self._num_threads = torch.get_num_threads()
        self._linears.seal()
        self._products.seal(self._head_dim)
        self._digest = arithmetic_digest(self._linears.functions(), self._products, self._head_dim)
        if before not in (None, self.numerics()):
            raise RuntimeError("the number of threads changed, and with it the numerics: load the model again")
