"""The proof under a reply: how little of its prompt had to be computed, and if it was much, why."""

from __future__ import annotations

from ..records import ReplyStats
from . import format
from .miss import reuse_text

MIN_MISSED_TOKENS = 64
MIN_MISSED_SHARE = 0.25
"""A prompt always brings something new; where it is not known what is new, the reason is told from here on."""


def proof_text(stats: ReplyStats) -> str:
    """`reused 2,944/3,098 tok (95%) device 1,900 disk 1,044 · loaded in ~0.12 s · prefill 154 in 0.08 s · TTFT 0.19 s`.

    Tiers are named when others than the device took part.
    """
    num_prompt, num_cached = stats.num_prompt_tokens, stats.num_cached_tokens
    reused = f"reused {num_cached:,}/{num_prompt:,} tok"
    reused += f" ({100 * num_cached // num_prompt}%)" if num_prompt else ""
    if any(tier != "device" for tier, _ in stats.cached_by_tier):
        reused += "".join(f" {tier} {count:,}" for tier, count in stats.cached_by_tier)
    parts = [reused]
    parts += [f"loaded in ~{format.duration(stats.load_s)}"] if stats.load_s is not None else []
    if stats.prefill_s and stats.num_missed_tokens:
        parts.append(f"prefill {stats.num_missed_tokens:,} in {format.duration(stats.prefill_s)}")
    parts += [f"TTFT {format.duration(stats.ttft_s)}", f"{stats.tokens_per_s:.1f} tok/s"]
    return " · ".join(parts)


def why_computed(stats: ReplyStats) -> str:
    """Why something was computed that could have been kept, when it made much work; else ""."""
    reuse = stats.reuse
    if reuse.num_recomputed_tokens is not None:  # A new text is no reason, however long it is.
        return reuse_text(reuse) if reuse.num_recomputed_tokens >= MIN_MISSED_TOKENS else ""
    is_much = stats.num_missed_tokens >= max(MIN_MISSED_TOKENS, MIN_MISSED_SHARE * stats.num_prompt_tokens)
    return reuse_text(reuse) if is_much and reuse.miss is not None and reuse.miss.is_other_kept else ""
