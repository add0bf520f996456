"""How large the block pool is: what fits, and what was decided, in words."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .config import BLOCK_SIZE
from .errors import EngineError
from .kv_layout import KVLayout

CPU_POOL_SHARE = 0.25
CPU_POOL_LIMIT_BYTES = 4 << 30


class PoolTooSmallError(EngineError):
    """One conversation of the context asked for would not fit."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    num_blocks: int
    block_bytes: int
    max_context_tokens: int
    explanation: str
    """One sentence for status and logs."""

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def plan_pool(
    layout: KVLayout,
    max_context_tokens: int,
    *,
    weight_bytes: int,
    memory_bytes: int,
    pool_bytes: int | None = None,
) -> PoolPlan:
    """The pool for a CPU with `memory_bytes` of RAM: `pool_bytes` where the person set it, else min(25 %, 4 GiB), and
    in any case room for one context.

    weight_bytes: what the loaded weights take. Raises PoolTooSmallError with all numbers when that cannot be.
    """
    block_bytes = layout.block_bytes
    context_blocks = -(-max_context_tokens // BLOCK_SIZE)
    needed_bytes = context_blocks * block_bytes
    wanted_bytes = min(int(memory_bytes * CPU_POOL_SHARE), CPU_POOL_LIMIT_BYTES) if pool_bytes is None else pool_bytes
    if pool_bytes is not None and needed_bytes > pool_bytes:
        raise PoolTooSmallError(
            f"The KV cache is set to {_size(pool_bytes)}, but one context of {max_context_tokens} tokens takes "
            f"{_size(needed_bytes)}. Raise the cache size, or set a context of at most "
            f"{pool_bytes // block_bytes * BLOCK_SIZE} tokens.{_hint(layout)}"
        )
    free_bytes = max(0, memory_bytes - weight_bytes)
    if needed_bytes > free_bytes:
        raise PoolTooSmallError(
            f"One context of {max_context_tokens} tokens takes {_size(needed_bytes)}, but beside the weights "
            f"({_size(weight_bytes)}) only {_size(free_bytes)} of this machine's {_size(memory_bytes)} remain. "
            f"Set a context of at most {free_bytes // block_bytes * BLOCK_SIZE} tokens, or choose a smaller model."
            f"{_hint(layout)}"
        )
    num_blocks = max(context_blocks, min(wanted_bytes, free_bytes) // block_bytes)
    origin = "25 % of memory, at most 4 GiB" if pool_bytes is None else "as set"
    if num_blocks == context_blocks:
        origin = "one context"
    explanation = (
        f"KV cache: {num_blocks} blocks of {BLOCK_SIZE} tokens in {layout.kv_dtype}, "
        f"{_size(num_blocks * block_bytes)} ({origin}), room for {num_blocks * BLOCK_SIZE} tokens or "
        f"{num_blocks // context_blocks} full contexts."
    )
    return PoolPlan(num_blocks, block_bytes, max_context_tokens, explanation)


def _hint(layout: KVLayout) -> str:
    share = {"fp32": "a quarter", "fp16": "half"}.get(layout.kv_dtype)
    return f' With kv_dtype = "int8" a token takes little more than {share}.' if share else ""


def machine_memory_bytes() -> int:
    """RAM this process may use: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(file, encoding="ascii") as stream:
                limits.append(int(stream.read()))
        except (OSError, ValueError):
            # No such group, or the word "max": no limit.
            continue
    return min(limits)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"
