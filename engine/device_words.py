"""A plan for a card in plain words: what was chosen and what it costs, or why it cannot be and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .config import BLOCK_SIZE

if TYPE_CHECKING:
    from .device_planner import DevicePlan

COSTS = {
    "fp8": "8 bits cost hardly any quality",
    "int8": "8 bits cost hardly any quality",
    "int4": "4 bits cost some quality",
}
"""By the beginning of a weight format's name."""
BILLION = 1_000_000_000
LEAST_CONTEXT_TOKENS = 64
"""That the settings allow."""
LEAST_BILLIONS = 0.1
"""Smaller models are not worth naming."""


def explanation(plan: DevicePlan) -> str:
    option, demand, finer = plan.option, plan.demand, plan.finer
    facts = [f"{option.bits_per_weight:.1f} bits each"]
    if finer is not None:
        facts += [words for name, words in COSTS.items() if option.weight_format.startswith(name)]
        facts.append(f"{finer.weight_format} would take {size(finer.num_bytes)}, too much beside eight chats")
    contexts = plan.num_blocks // demand.context_blocks
    is_as_set = demand.pool_bytes is not None and demand.pool_bytes < plan.pool_bytes + plan.block_bytes
    words = (
        f"Weights in {option.weight_format}, {size(option.num_bytes)} ({'; '.join(facts)}). KV cache: "
        f"{plan.num_blocks:,} blocks of {BLOCK_SIZE} tokens in {plan.kv_dtype}, {size(plan.pool_bytes)}"
        f"{' (as set)' if is_as_set else ''}, room for {plan.num_blocks * BLOCK_SIZE:,} tokens or "
        f"{contexts:,} full context{'' if contexts == 1 else 's'}; {size(plan.reserve_bytes)} of "
        f"{size(plan.card.total_bytes)} stay free for other programs."
    )
    if plan.finest_in_8_bits is not None:
        words += f' With kv_dtype = "int8" there would be room for weights in {plan.finest_in_8_bits.weight_format}.'
    return words


def refusal(plan: DevicePlan, in_8_bits: DevicePlan | None, others: list[DevicePlan]) -> str:
    """No room for one full context. in_8_bits: the same with K and V in 8 bits, where that is less. others: the same
    in the formats that "auto" chooses from."""
    demand, card = plan.demand, plan.card
    return (
        f"{card.name} has too little memory: one context of {demand.max_context_tokens:,} tokens takes "
        f"{size(demand.context_bytes)} in {plan.kv_dtype}, the weights {size(plan.weight_bytes)} in "
        f"{plan.weight_format}, buffers {size(plan.cuda_bytes + plan.buffer_bytes)}, and "
        f"{size(plan.reserve_bytes)} are to stay free for other programs: {size(plan.needed_bytes)} together. "
        f"{size(card.free_bytes)} of {size(card.total_bytes)} are free. "
        f"{' '.join(_ways_out(plan, in_8_bits, others))}"
    )


def set_too_small(plan: DevicePlan, pool_bytes: int) -> str:
    demand = plan.demand
    return (
        f"The KV cache is set to {size(pool_bytes)}, but one context of {demand.max_context_tokens:,} tokens takes "
        f"{size(demand.context_bytes)} in {plan.kv_dtype}. Raise kv_bytes, or set a context of at most "
        f"{pool_bytes // plan.block_bytes * BLOCK_SIZE:,} tokens."
    )


def taken_meanwhile(plan: DevicePlan) -> str:
    """Planned, loaded, and then another program was quicker."""
    demand, card = plan.demand, plan.card
    return (
        f"Another program took memory of {card.name} while the model was loaded: {size(card.free_bytes)} are free "
        f"beside the weights, and {size(plan.needed_bytes)} are needed for one context of "
        f"{demand.max_context_tokens:,} tokens ({size(demand.context_bytes)} in {plan.kv_dtype}), buffers "
        f"({size(plan.buffer_bytes)}) and what is to stay free ({size(plan.reserve_bytes)}). Close that program "
        f"(nvidia-smi lists who holds what), or set fewer context_tokens."
    )


def taken_while_loading(plan: DevicePlan, free_bytes: int) -> str:
    return (
        f"Another program took memory of {plan.card.name} while the model was loaded: of {size(plan.card.free_bytes)} "
        f"that were free, {size(free_bytes)} are now, and the weights alone take {size(plan.weight_bytes)}. Close that "
        f"program (nvidia-smi lists who holds what)."
    )


def size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


def _ways_out(plan: DevicePlan, in_8_bits: DevicePlan | None, others: list[DevicePlan]) -> Iterator[str]:
    """Sentences, the easiest way first."""
    card = plan.card
    missing_bytes = plan.needed_bytes - card.free_bytes
    held_bytes = card.total_bytes - card.free_bytes
    if missing_bytes <= held_bytes // 2:
        yield f"Other programs hold {size(held_bytes)}: closing them may give room."
    if missing_bytes <= plan.reserve_bytes:
        yield f"It fits with gpu_reserve_bytes of at most {(plan.reserve_bytes - missing_bytes) >> 20} MiB."
    if in_8_bits is not None and in_8_bits.holds_a_context:
        yield 'It fits with kv_dtype = "int8".'
    if any(other.holds_a_context for other in others):
        yield 'It fits with weight_format = "auto".'
    num_tokens = max(0, plan.left_bytes) // plan.block_bytes * BLOCK_SIZE
    if num_tokens >= LEAST_CONTEXT_TOKENS:
        yield f"A context of {num_tokens:,} tokens fits."
    else:
        billions = plan.left_weight_bytes * 8 / plan.option.bits_per_weight / BILLION
        if billions >= LEAST_BILLIONS:
            yield f"A model of about {billions:.1f} billion weights fits in {plan.weight_format}."
    yield 'device = "cpu" runs it on the CPU.'
