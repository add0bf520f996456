"""What the cache holds: tier by tier, chat by chat, and what chats have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatkv.app.chats.blocks import ChatChain
from chatkv.app.chats.records import ChatSummary
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.tiers.tier import TierStats

from .kv_store import KvStore
from .loaded import LoadedModel
from .reuse import COMPUTED

MAX_CHATS = 300
MIN_SHARED_CHATS = 2


@dataclass(frozen=True, slots=True)
class ShownChat:
    """A chat that has a chain under the loaded model's fingerprint."""

    summary: ChatSummary
    chain: ChatChain
    is_running: bool


@dataclass(frozen=True, slots=True)
class SharedHead:
    """The longest common beginning of a set of chats."""

    num_blocks: int
    chat_ids: tuple[str, ...]


def cache_report(
    model: LoadedModel | None,
    model_state: str,
    kv_store: KvStore,
    chats: Sequence[ShownChat],
    hit_tokens: Mapping[str, int],
    damaged: Collection[bytes],
) -> dict[str, Any]:
    """The whole answer of `/chatkv/cache`. Long: call it in the text pool. `hit_tokens`: by tier, of 24 hours."""
    heads = list(shared_heads([shown.chain for shown in chats]))
    stats = model.engine.stats() if model else None
    return {
        "model": model.name if model else None,
        "model_state": model_state,
        "kv_dtype": model.kv_dtype if model else None,
        "block_size": BLOCK_SIZE,
        "block_bytes": model.block_bytes if model else 0,
        "num_blocks": stats.num_blocks if stats else 0,
        "num_used": stats.num_used if stats else 0,
        "num_cached": stats.num_cached if stats else 0,
        "num_free": stats.num_free if stats else 0,
        "tiers": tiers_json(model, kv_store, hit_tokens),
        "computed_tokens_24h": hit_tokens.get(COMPUTED, 0),
        "prompt_tokens_24h": sum(hit_tokens.values()),
        "chats": [_chat_json(model, shown, heads, damaged) for shown in chats] if model else [],
        "shared": [_head_json(head, chats) for head in heads],
        "evicts_next": _evicts_next(model, chats),
    }


def tiers_json(model: LoadedModel | None, kv_store: KvStore, hit_tokens: Mapping[str, int]) -> dict[str, Any]:
    short = short_tiers(model, kv_store)
    for name, shown in short.items():
        if shown is not None:
            shown["hit_tokens_24h"] = hit_tokens.get(name, 0)
    status = kv_store.status
    short["disk"]["slabs"] = [
        {
            "model": slab.model,
            "num_blocks": slab.num_blocks,
            "bytes": slab.bytes,
            "last_used_at": slab.last_used,
            "is_open": slab.is_open,
        }
        for slab in (status.slabs if status else ())
    ]
    return short


def short_tiers(model: LoadedModel | None, kv_store: KvStore) -> dict[str, Any]:
    """Sizes alone, for the status. Cheap."""
    stats = model.engine.stats() if model else None
    by_tier = stats.tiers if stats else {}
    device = None
    if model is not None and stats is not None:
        device = {
            "num_blocks": stats.num_blocks,
            "num_used_blocks": stats.num_used,
            "num_cached_blocks": stats.num_cached,
            "block_bytes": model.block_bytes,
            "used_bytes": (stats.num_used + stats.num_cached) * model.block_bytes,
            "limit_bytes": stats.num_blocks * model.block_bytes,
        }
    host = by_tier.get("host")
    return {
        "device": device,
        "host": None if host is None else _sizes(host),
        "disk": _disk_json(kv_store, by_tier.get("disk")),
    }


def shared_heads(chains: Sequence[ChatChain]) -> Iterator[SharedHead]:
    """Common beginnings of at least two chats, a longer one of fewer chats after the shorter one of more.

    The nodes of the compact trie of the chains where at least two of them pass: found by splitting the chats by their
    next block behind what they have in common.
    """
    due: list[tuple[int, list[ChatChain]]] = [(0, list(chains))]
    while due:
        start, group = due.pop(0)
        if len(group) < MIN_SHARED_CHATS:
            continue
        end = start
        shortest = min(len(chain.hashes) for chain in group)
        while end < shortest and all(chain.hashes[end] == group[0].hashes[end] for chain in group):
            end += 1
        if end > start:
            yield SharedHead(end, tuple(chain.chat_id for chain in group))
        by_next: dict[bytes, list[ChatChain]] = {}
        for chain in group:
            if len(chain.hashes) > end:
                by_next.setdefault(chain.hashes[end], []).append(chain)
        due += [(end, part) for part in by_next.values()]


def _chat_json(
    model: LoadedModel, shown: ShownChat, heads: Sequence[SharedHead], damaged: Collection[bytes]
) -> dict[str, Any]:
    chain, summary = shown.chain, shown.summary
    placement = model.engine.engine.place(chain.hashes)
    shared = [head.num_blocks for head in heads if chain.chat_id in head.chat_ids]
    return {
        "chat_id": chain.chat_id,
        "title": summary.title,
        "is_pinned": summary.is_pinned,
        "is_private": summary.is_private,
        "num_tokens": chain.num_tokens,
        "runs": [[tier, num_blocks] for tier, num_blocks in placement.num_by_run],
        "num_shared_blocks": max(shared, default=0),
        "last_used_at": chain.updated_at,
        "resume_s": _rounded(placement.load_s),
        "compute_s": _rounded(placement.compute_s),
        "is_running": shown.is_running,
        "num_damaged": sum(block_hash in damaged for block_hash in chain.hashes),
    }


def _head_json(head: SharedHead, chats: Sequence[ShownChat]) -> dict[str, Any]:
    owners = [shown.summary for shown in chats if shown.chain.chat_id in head.chat_ids]
    oldest = min(owners, key=lambda summary: summary.created_at)
    return {
        "num_blocks": head.num_blocks,
        "num_tokens": head.num_blocks * BLOCK_SIZE,
        "label": f"{oldest.title or 'untitled'} and {len(owners) - 1} more",
        "chat_ids": list(head.chat_ids),
    }


def _evicts_next(model: LoadedModel | None, chats: Sequence[ShownChat]) -> str | None:
    """The chat that nobody came back to for the longest time: an estimate, the tier decides block by block."""
    loose = [shown for shown in chats if not shown.summary.is_pinned and not shown.is_running and shown.chain.hashes]
    if model is None or not loose:
        return None
    return min(loose, key=lambda shown: shown.chain.updated_at).chain.chat_id


def _disk_json(kv_store: KvStore, stats: TierStats | None) -> dict[str, Any]:
    status = kv_store.status
    return {
        "state": kv_store.state.value,
        "is_encrypted": kv_store.is_encrypted,
        "notice": kv_store.notice or (stats.notice if stats else None),
        "used_bytes": status.used_bytes if status else 0,
        "limit_bytes": status.quota_bytes if status else 0,
        "num_blocks": sum(slab.num_blocks for slab in status.slabs) if status else 0,
        "num_queued": stats.num_queued if stats else 0,
        "written_today_bytes": status.written_today_bytes if status else 0,
        "read_bytes_per_s": stats.read_bytes_per_s if stats else 0.0,
    }


def _sizes(stats: TierStats) -> dict[str, Any]:
    return {"used_bytes": stats.used_bytes, "limit_bytes": stats.limit_bytes, "num_blocks": stats.num_blocks}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
