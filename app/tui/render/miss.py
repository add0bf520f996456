"""Why a prompt was not reused further, in words."""

from __future__ import annotations

from ..cache_records import Miss
from .width import shorten

SHOWN_CELLS = 32


def miss_text(miss: Miss) -> str:
    """`differs at token 412: “Plan 4 days”, where “Plan 3 days” is kept`, or that nothing was kept from there on."""
    here = f"“{shorten(miss.text, SHOWN_CELLS)}”"
    after = f" after “…{miss.text_before[-SHOWN_CELLS // 2 :]}”" if miss.text_before else ""
    if miss.expected_text:
        kept = shorten(miss.expected_text, SHOWN_CELLS)
        return f"differs from token {miss.position:,} on{after}: {here}, where “{kept}” is kept"
    return f"nothing is kept from token {miss.position:,} on{after}: {here}"
