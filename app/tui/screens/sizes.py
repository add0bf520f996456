"""Which layout fits a terminal."""

from __future__ import annotations

CLASSES = ("-wide", "-narrow", "-bare", "-too-small")


def size_class(width: int, height: int) -> str:
    """Wide: the list stands beside the chat. Narrow: it comes over it. Bare: conversation and composer only."""
    if width < 40 or height < 10:
        return "-too-small"
    if width < 60 or height < 16:
        return "-bare"
    return "-wide" if width >= 100 else "-narrow"
