"""What forgetting a chat's blocks did, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..json_fields import integer, mapping


def forgotten_text(answer: Mapping[str, Any]) -> str:
    """`answer` holds `num_removed`, `num_shared` and `is_complete`."""
    removed, shared = integer(answer, "num_removed"), integer(answer, "num_shared")
    stay = f"; {shared:,} stay, since other chats begin with them" if shared else ""
    rest = " Something could not be removed from the disk yet." if answer.get("is_complete") is False else ""
    return f"{removed:,} cached blocks are gone{stay}.{rest}"


def cached_gone(answer: Mapping[str, Any]) -> str:
    """What deleting a chat did to the cache, as a sentence; "" when nothing was kept."""
    cache = mapping(answer, "cache")
    is_worth_saying = integer(cache, "num_removed") or integer(cache, "num_shared") or cache.get("is_complete") is False
    return forgotten_text(cache) if is_worth_saying else ""
