"""What lies on a card: weights in which format, buffers, and a pool of what is left. Nothing is ever promised twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from chatkv.kernels.device_facts import Card

from . import device_words
from .config import BLOCK_SIZE
from .device_buffers import Buffers
from .kv_layout import KVLayout
from .models.config import ModelConfig
from .planner import PoolTooSmallError
from .weight_options import WeightOption

T = TypeVar("T")

CUDA_BYTES = 448 << 20
"""CUDA's own state of a process on a card, where it was not made before the free memory was measured."""
RUNTIME_BYTES = 192 << 20
"""Modules of torch, cuBLAS and Triton that load at their first use, and cuBLAS's workspaces."""
LEAST_RESERVE_BYTES = 600 << 20
RESERVE_SHARE = 0.06
HEADLESS_RESERVE_BYTES = 256 << 20
ROUNDING_BYTES = 32 << 20
ROUNDING_DIVISOR = 64
"""The allocator gives weights out of pieces of 2 and 20 MiB: ROUNDING_BYTES and one byte in so many stay unused."""
NUM_CHATS = 8
CHAT_TOKENS = 2048
"""A chat of middle length: the blocks of NUM_CHATS such chats should find room beside one full context."""
EIGHT_BITS = "int8"


@dataclass(frozen=True, slots=True)
class DeviceDemand:
    """What is asked of a card."""

    config: ModelConfig
    max_context_tokens: int
    kv_dtype: str
    """A name that `kv_layout` knows."""
    buffers: Buffers = field(default_factory=Buffers)
    pool_bytes: int | None = None
    """As set; None: all that is left."""
    reserve_bytes: int | None = None
    """For other programs, as set; None: by whether a desktop draws on the card."""

    @property
    def layout(self) -> KVLayout:
        return KVLayout.of(self.config, self.kv_dtype, "position")

    @property
    def context_blocks(self) -> int:
        return _num_blocks(self.max_context_tokens)

    @property
    def context_bytes(self) -> int:
        return self.context_blocks * self.layout.block_bytes

    @property
    def roomy_blocks(self) -> int:
        """Of a pool that holds one full context and eight chats; less where less is set."""
        wanted = self.context_blocks + NUM_CHATS * _num_blocks(min(CHAT_TOKENS, self.max_context_tokens))
        return wanted if self.pool_bytes is None else min(wanted, self.pool_bytes // self.layout.block_bytes)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Parts whose sum is at most `card.free_bytes`. Sizes in bytes."""

    demand: DeviceDemand
    card: Card
    option: WeightOption
    weight_bytes: int
    """What the allocator takes for them; 0 once they are loaded and the card was measured again."""
    cuda_bytes: int
    buffer_bytes: int
    reserve_bytes: int
    """Stays free."""
    num_blocks: int = 0
    finer: WeightOption | None = None
    """The next better format, which would have left too little room; None: there is none, or it was not asked for."""
    finest_in_8_bits: WeightOption | None = None
    """A better format that there would be room for with K and V in 8 bits."""

    @property
    def explanation(self) -> str:
        """For status and logs: what was chosen, and what it costs."""
        return device_words.explanation(self)

    @property
    def weight_format(self) -> str:
        return self.option.weight_format

    @property
    def kv_dtype(self) -> str:
        return self.demand.kv_dtype

    @property
    def block_bytes(self) -> int:
        return self.demand.layout.block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def rest_bytes(self) -> int:
        """Everything but the pool."""
        return self.weight_bytes + self.cuda_bytes + self.buffer_bytes + self.reserve_bytes

    @property
    def total_bytes(self) -> int:
        return self.rest_bytes + self.pool_bytes

    @property
    def needed_bytes(self) -> int:
        """With a pool of one full context, the smallest that there can be."""
        return self.rest_bytes + self.demand.context_bytes

    @property
    def left_bytes(self) -> int:
        """For the pool; negative where not even the rest fits."""
        return self.card.free_bytes - self.rest_bytes

    @property
    def left_weight_bytes(self) -> int:
        """What weights could take beside one full context; negative where that does not fit alone."""
        allocated = self.card.free_bytes - (self.needed_bytes - self.weight_bytes)
        return (allocated - ROUNDING_BYTES) * ROUNDING_DIVISOR // (ROUNDING_DIVISOR + 1)

    @property
    def holds_a_context(self) -> bool:
        return self.num_blocks >= self.demand.context_blocks

    @property
    def is_roomy(self) -> bool:
        """A full context and eight chats find room, as far as a set pool allows."""
        return self.num_blocks >= self.demand.roomy_blocks

    def remeasured(self, free_bytes: int) -> DevicePlan:
        """With the weights loaded and `free_bytes` free now.

        Raises PoolTooSmallError when another program left less than one context.
        """
        card = replace(self.card, free_bytes=free_bytes, has_context=True)
        plan = _with_pool(replace(self, card=card, weight_bytes=0, cuda_bytes=0))
        if not plan.holds_a_context:
            raise PoolTooSmallError(device_words.taken_meanwhile(plan))
        return plan


def plan_device(
    demand: DeviceDemand, options: Sequence[WeightOption], card: Card, others: Sequence[WeightOption] = ()
) -> DevicePlan:
    """`options`: best first, each smaller than the one before. `others`: what "auto" would have chosen from.

    The first that leaves room for a full context and eight chats is taken; where none does, the smallest. So more
    memory never makes the format worse, nor the pool smaller while the format stays. Raises PoolTooSmallError with all
    numbers, and what would fit, when even the smallest leaves no room for a full context.
    """
    plans = [_planned(demand, option, card) for option in options]
    if demand.pool_bytes is not None and demand.pool_bytes < demand.context_bytes:
        raise PoolTooSmallError(device_words.set_too_small(plans[-1], demand.pool_bytes))
    chosen = next((i for i, plan in enumerate(plans) if plan.is_roomy), len(plans) - 1)
    plan = plans[chosen]
    leaner = replace(demand, kv_dtype=EIGHT_BITS)
    is_leaner = leaner.layout.block_bytes < demand.layout.block_bytes
    if not plan.holds_a_context:
        in_8_bits = _planned(leaner, plan.option, card) if is_leaner else None
        rest = [_planned(demand, other, card) for other in others]
        raise PoolTooSmallError(device_words.refusal(plan, in_8_bits, rest))
    finest = None
    if is_leaner:
        roomy = (option for option in options[:chosen] if _planned(leaner, option, card).is_roomy)
        finest = next(roomy, None)
    return replace(plan, finer=options[chosen - 1] if chosen else None, finest_in_8_bits=finest)


def allocate_pool(
    plan: DevicePlan, measure_free_bytes: Callable[[], int], allocate: Callable[[int], T]
) -> tuple[DevicePlan, T]:
    """Take the pool, once the weights are loaded: (the plan as it came to be, what `allocate(num_blocks)` gave).

    `allocate` may run out of memory when another program is quicker; then a smaller pool is tried, down to one context.
    measure_free_bytes: what this process could take now, memory that it no longer uses included. Raises
    PoolTooSmallError when not even one context is to be had.
    """
    least = plan.demand.context_blocks
    num_blocks: int | None = None
    while True:
        plan = plan.remeasured(measure_free_bytes())
        if num_blocks is not None:
            plan = replace(plan, num_blocks=min(plan.num_blocks, num_blocks))
        allocated = _try_to_allocate(plan, allocate)
        if allocated is not None:
            return plan, allocated
        if plan.num_blocks == least:
            raise PoolTooSmallError(device_words.taken_meanwhile(plan))
        # Free memory need not lie in one piece, so the measure alone may promise too much.
        num_blocks = max(least, plan.num_blocks * 7 // 8)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Torch's allocator has a type of its own for it. CUDA where it keeps captured steps or locks memory, Triton where
    it loads a kernel, and cuBLAS only say so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))


def loading_failed(plan: DevicePlan, free_bytes: int) -> PoolTooSmallError:
    """The weights themselves found no room: another program took memory after the plan was made."""
    return PoolTooSmallError(device_words.taken_while_loading(plan, free_bytes))


def default_reserve_bytes(card: Card) -> int:
    """What stays free for others: more where a desktop draws, or may draw, on the card."""
    if card.has_display is False:
        return HEADLESS_RESERVE_BYTES
    return max(LEAST_RESERVE_BYTES, int(card.total_bytes * RESERVE_SHARE))


def allocated_weight_bytes(option: WeightOption) -> int:
    return option.num_bytes + option.num_bytes // ROUNDING_DIVISOR + ROUNDING_BYTES


def _try_to_allocate(plan: DevicePlan, allocate: Callable[[int], T]) -> T | None:
    """A function of its own: the error holds what was allocated before it, until it is out of scope."""
    try:
        return allocate(plan.num_blocks)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _planned(demand: DeviceDemand, option: WeightOption, card: Card) -> DevicePlan:
    return _with_pool(
        DevicePlan(
            demand=demand,
            card=card,
            option=option,
            weight_bytes=allocated_weight_bytes(option),
            cuda_bytes=0 if card.has_context else CUDA_BYTES,
            buffer_bytes=demand.buffers.num_bytes(demand.config, demand.max_context_tokens)
            + option.scratch_bytes
            + RUNTIME_BYTES,
            reserve_bytes=default_reserve_bytes(card) if demand.reserve_bytes is None else demand.reserve_bytes,
        )
    )


def _with_pool(plan: DevicePlan) -> DevicePlan:
    """Of all that is left, or as set."""
    set_bytes = plan.demand.pool_bytes
    pool_bytes = plan.left_bytes if set_bytes is None else min(plan.left_bytes, set_bytes)
    return replace(plan, num_blocks=max(0, pool_bytes) // plan.block_bytes)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
