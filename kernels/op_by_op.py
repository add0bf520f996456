"""Runs a program operation by operation on a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .backend import Backend, PreparedLinear, StepPlan
from .executor import OnProgress, StepResult, StepRows
from .kv_blocks import KeyOrder, KVBlocks
from .program import Attend, Embed, Gate, Linear, Norm, Program, ProgramOp, Register, RotateAndStore, Select, Take


@dataclass(frozen=True, slots=True)
class _Multiply:
    """`Linear` with its matrices as the backend holds them."""

    target: Register
    prepared: PreparedLinear
    is_added: bool


_Op: TypeAlias = Embed | Norm | Take | Gate | _Multiply | RotateAndStore | Attend | Select


class OpByOp:
    """Implements `Executor`."""

    keys_by: KeyOrder = "position"

    def __init__(self, program: Program, backend: Backend, description: str, on_progress: OnProgress | None = None):
        self._num_heads, self._num_kv_heads, self._head_dim = program.num_heads, program.num_kv_heads, program.head_dim
        self._vocab_size, self._scale = program.vocab_size, program.scale
        self._inverse_frequencies, self._attention_factor = program.inverse_frequencies, program.attention_factor
        self._backend = backend
        self.description = description
        self._ops: list[_Op] = []
        for done, op in enumerate(program.ops):
            self._ops.append(self._prepared(op))
            if on_progress:
                on_progress(done / len(program.ops))
        self.weight_bytes = sum(backend.weight_bytes(op.prepared) for op in self._ops if isinstance(op, _Multiply))
        self.weight_bytes += program.table_bytes
        backend.seal(program.num_heads, program.num_kv_heads, program.head_dim)
        if on_progress:
            on_progress(1.0)

    @property
    def device(self) -> torch.device:
        return self._backend.device

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        return self._backend.kv_dtypes

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def numerics(self) -> dict[str, str | int]:
        return self._backend.numerics()

    @torch.inference_mode()
    def run(self, rows: StepRows, kv: KVBlocks) -> StepResult:
        backend = self._backend
        token_ids, slots, selected = (
            torch.tensor(numbers, dtype=torch.int64, device=backend.device)
            for numbers in (rows.token_ids, rows.slots, rows.selected)
        )
        plan = backend.plan_step(kv, slots, rows.spans)
        angles = self._angles(rows)
        registers: dict[Register, Tensor] = {}
        activations = is_finite = torch.empty(0)
        for op in self._ops:
            match op:
                case Embed(target, table):
                    registers[target] = backend.embedding(token_ids, table)
                case Norm(source, weight, eps):
                    activations = backend.rms_norm(registers[source], weight, eps)
                case Take(source):
                    activations = registers[source]
                case Gate(source):
                    activations = backend.silu_mul(registers[source])
                case _Multiply(target, prepared, is_added):
                    product = backend.linear(activations, prepared)
                    registers[target] = registers[target] + product if is_added else product
                case RotateAndStore():
                    registers[op.heads] = self._rotate_and_store(op, plan, registers[op.heads], angles)
                case Attend(heads, target, layer, window):
                    queries = registers[heads][:, : self._num_heads]
                    registers[target] = backend.paged_attention(plan, layer, queries, self._scale, window).flatten(1)
                case Select(source, target):
                    is_finite = registers[source].isfinite().all(-1)
                    if not rows.selected:
                        registers[Register.LOGITS] = torch.empty(0, self._vocab_size)
                        break
                    registers[target] = registers[source][selected]
        return StepResult(registers[Register.LOGITS], is_finite.cpu().numpy())

    def _prepared(self, op: ProgramOp) -> _Op:
        if not isinstance(op, Linear):
            return op
        return _Multiply(op.target, self._backend.prepare_linear(op.weights, op.bias), op.is_added)

    def _angles(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, head_dim / 2]."""
        positions = [position for span in rows.spans for position in range(span.start_position, span.end_position)]
        angles = torch.tensor(positions, dtype=torch.float32).unsqueeze(1) * self._inverse_frequencies
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor

    def _rotate_and_store(
        self, op: RotateAndStore, plan: StepPlan, numbers: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """float32 [T, q, k and v side by side] -> [T, heads of q and k, head_dim]."""
        num_rotated = self._num_heads + self._num_kv_heads
        heads = numbers.view(len(numbers), -1, self._head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if op.norm is not None:
            rotated = self._backend.rms_norm(rotated, op.norm, op.eps)
        if op.has_rope:
            rotated = self._backend.rope(rotated, *angles)
        self._backend.kv_write(plan, op.layer, rotated[:, self._num_heads :], values)
        return rotated
