"""Tensor operations of the decoder: their list, and which backend runs them on a device.

Every operation has its specification in `reference.py` or `reference_attention.py`; a backend is tested against it.
Backends know tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .backend import Backend
from .cpu import CpuBackend
from .cpu.native.model import native_executor
from .executor import Executor, OnProgress
from .kv_blocks import KVBlocks
from .op_by_op import OpByOp
from .program import Program

__all__ = ["OPERATIONS", "Backend", "Executor", "KVBlocks", "KernelChoice", "Operation", "backend_for", "executor_for"]


class Operation(NamedTuple):
    name: str
    inputs: str
    output: str


OPERATIONS = (
    Operation("embedding", "token ids int64 [T], weight [vocab_size, hidden_size] packed", "float32 [T, hidden_size]"),
    Operation("linear", "float32 [T, K], weight [N, K] as fp, int8 or int4-affine (groups of 32)", "float32 [T, N]"),
    Operation("rms_norm", "float32 [..., n], weight float32 [n] or [heads, n], eps", "float32 [..., n]"),
    Operation("rope", "float32 [T, heads, head_dim], cos and sin float32 [T, head_dim / 2]", "same as the input"),
    Operation("kv_write", "K, V float32 [T, kv_heads, head_dim], slots int64 [T] (negative: skip)", "into the pool"),
    Operation("quantise_rows", "float32 [..., n]: one row of K or V", "int8 [..., n], scales float32 [...]"),
    Operation("paged_attention", "Q float32 [T, heads, head_dim], pool, block tables, scale, window", "same as Q"),
    Operation("silu_mul", "gate and up side by side, float32 [T, 2 * n]", "float32 [T, n]"),
    Operation("head", "float32 [samples, hidden_size], norm weight, eps, weight [vocab_size, hidden_size]", "logits"),
    Operation("sample", "logits float32 [samples, vocab_size], one specification a row", "token ids"),
)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """On what a model runs."""

    device: str = "cpu"
    """"cpu"; "cuda", "cuda:1": a card; "interpreter": the GPU's kernels on the CPU, for tests, with TRITON_INTERPRET=1
    in the environment from the start."""
    cpu_kernels: Literal["auto", "torch"] = "auto"
    """"auto": native ones where they can be had and suit the model."""
    num_threads: int = 0
    """Of the native kernels; 0: as many as torch uses."""
    compute_dtype: Literal["bf16", "fp16"] = "bf16"
    """Of the GPU's kernels."""
    is_deterministic: bool = False
    """On the GPU: what a row computes does not depend on the rows beside it. The CPU is always so."""
    has_fp8_activations: bool | None = None
    """On the GPU: many rows are rounded to fp8 before they meet fp8 weights; None: where the card multiplies fp8."""


def executor_for(choice: KernelChoice, program: Program, on_progress: OnProgress | None = None) -> Executor:
    """What runs `program`. Raises ValueError for a device that has no kernels."""
    if choice.device.startswith(("cuda", "interpreter")):
        return _triton_executor(choice, program, on_progress)
    backend = backend_for(choice.device)
    if choice.cpu_kernels == "torch":
        reason = 'as cpu_kernels = "torch" asks'
    else:
        executor = native_executor(program, choice.num_threads or torch.get_num_threads())
        if not isinstance(executor, str):
            return executor
        reason = executor
    return OpByOp(program, backend, f"torch ({reason})", on_progress)


def backend_for(device: str) -> Backend:
    """The backend that runs on `device` ("cpu"). Raises ValueError for a device that has none."""
    if device == "cpu":
        return CpuBackend()
    raise ValueError(f"no kernels for device {device!r}: 'cpu' and 'cuda' are possible")


def _triton_executor(choice: KernelChoice, program: Program, on_progress: OnProgress | None) -> Executor:
    from .triton.executor import TritonExecutor  # which takes a second to load

    device = torch.device("cpu" if choice.device == "interpreter" else choice.device)
    return TritonExecutor(
        program,
        device,
        choice.compute_dtype,
        is_deterministic=choice.is_deterministic,
        has_fp8_activations=choice.has_fp8_activations,
        on_progress=on_progress,
    )
