"""What forgetting a chat's blocks did, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..json_fields import integer, mapping


def forgotten_text(answer: Mapping[str, Any]) -> str:
    """`answer` holds `num_removed` and `num_shared`."""
    removed, shared = integer(answer, "num_removed"), integer(answer, "num_shared")
    stay = f"; {shared:,} stay, since other chats begin with them" if shared else ""
    return f"{removed:,} cached blocks are gone{stay}."


def cached_gone(answer: Mapping[str, Any]) -> str:
    """What deleting a chat did to the cache, as a sentence; "" when nothing was kept."""
    cache = mapping(answer, "cache")
    return forgotten_text(cache) if integer(cache, "num_removed") or integer(cache, "num_shared") else ""
