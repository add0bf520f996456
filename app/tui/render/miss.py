"""Why a prompt was not reused further, in words."""

from __future__ import annotations

from ..cache_records import Miss, Reuse
from .width import shorten

SHOWN_CELLS = 32


def reuse_text(reuse: Reuse) -> str:
    """One sentence on what a request computed, and why."""
    num_computed, miss = reuse.num_computed_tokens, reuse.miss
    if reuse.num_recomputed_tokens == 0:
        return f"only its new text was computed: {num_computed:,} of {reuse.num_prompt_tokens:,} tokens"
    if miss is not None and miss.is_other_kept:
        return miss_text(miss)
    if reuse.num_recomputed_tokens:
        return f"{reuse.num_recomputed_tokens:,} tokens of its earlier text were not kept{_place(miss)}"
    if miss is None:
        return "nothing that was kept was missed"
    return f"nothing was kept of its last {num_computed:,} tokens{_place(miss)}"


def miss_text(miss: Miss) -> str:
    """`differs from token 412 on: “Plan 4 days”, where “Plan 3 days” is kept`"""
    kept = f"“{shorten(miss.expected_text, SHOWN_CELLS)}”" if miss.expected_text else "other text"
    after = f" after “…{miss.text_before[-SHOWN_CELLS // 2 :]}”" if miss.text_before else ""
    return f"differs from token {miss.position:,} on{after}: “{shorten(miss.text, SHOWN_CELLS)}”, where {kept} is kept"


def _place(miss: Miss | None) -> str:
    return f", from token {miss.position:,} on: “{shorten(miss.text, SHOWN_CELLS)}”" if miss is not None else ""
