"""What the service tells of the KV cache, as records, sanitised as they enter the view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .json_fields import Json, integer, mapping, number, string
from .render.sanitize import sanitize, sanitize_line

MISSING = "missing"
TIERS = ("device", "host", "disk")
"""Fastest first; of a chain's blocks, what is in none of them is `missing`."""
Runs = tuple[tuple[str, int], ...]
"""Where a chain's blocks lie, first to last: (tier or `missing`, number of blocks)."""


@dataclass(frozen=True)
class TierUse:
    used_bytes: int = 0
    limit_bytes: int = 0
    num_blocks: int = 0
    hit_tokens_24h: int = 0

    @classmethod
    def from_json(cls, data: Json) -> TierUse:
        return cls(
            integer(data, "used_bytes"),
            integer(data, "limit_bytes"),
            integer(data, "num_blocks"),
            integer(data, "hit_tokens_24h"),
        )

    @property
    def share(self) -> float:
        return min(1.0, self.used_bytes / self.limit_bytes) if self.limit_bytes else 0.0


@dataclass(frozen=True)
class SlabUse:
    """What the disk holds for one model in one number format."""

    model: str
    num_blocks: int
    num_bytes: int
    last_used_at: float
    is_open: bool
    """The loaded model writes to it."""

    @classmethod
    def from_json(cls, data: Json) -> SlabUse:
        return cls(
            sanitize_line(string(data, "model")),
            integer(data, "num_blocks"),
            integer(data, "bytes"),
            number(data, "last_used_at"),
            bool(data.get("is_open")),
        )


@dataclass(frozen=True)
class DiskUse:
    use: TierUse = field(default_factory=TierUse)
    state: str = "off"
    """on, off, opening or memory_only."""
    is_encrypted: bool = False
    notice: str = ""
    num_queued: int = 0
    written_today_bytes: int = 0
    read_bytes_per_s: float = 0.0
    slabs: tuple[SlabUse, ...] = ()

    @classmethod
    def from_json(cls, data: Json) -> DiskUse:
        return cls(
            TierUse.from_json(data),
            string(data, "state") or "off",
            bool(data.get("is_encrypted")),
            sanitize_line(string(data, "notice")),
            integer(data, "num_queued"),
            integer(data, "written_today_bytes"),
            number(data, "read_bytes_per_s"),
            tuple(SlabUse.from_json(slab) for slab in data.get("slabs") or ()),
        )


@dataclass(frozen=True)
class Chain:
    """What is kept of one chat."""

    chat_id: str
    title: str = ""
    is_pinned: bool = False
    is_private: bool = False
    num_tokens: int = 0
    runs: Runs = ()
    num_shared_blocks: int = 0
    last_used_at: float = 0.0
    resume_s: float | None = None
    """To bring back what is kept and compute the rest."""
    compute_s: float | None = None
    """To compute all of it."""
    is_running: bool = False
    num_damaged: int = 0

    @classmethod
    def from_json(cls, data: Json) -> Chain:
        return cls(
            str(data.get("chat_id", "")),
            sanitize_line(string(data, "title")) or "New chat",
            bool(data.get("is_pinned")),
            bool(data.get("is_private")),
            integer(data, "num_tokens"),
            _runs(data.get("runs")),
            integer(data, "num_shared_blocks"),
            number(data, "last_used_at"),
            _optional_number(data, "resume_s"),
            _optional_number(data, "compute_s"),
            bool(data.get("is_running")),
            integer(data, "num_damaged"),
        )

    @cached_property
    def num_by_tier(self) -> Mapping[str, int]:
        """Blocks in each tier, the missing ones among them; tiers without any are left out."""
        counts: dict[str, int] = {}
        for tier, count in self.runs:
            counts[tier] = counts.get(tier, 0) + count
        return counts


@dataclass(frozen=True)
class SharedHead:
    """The blocks that several chats begin with; they are kept once."""

    num_blocks: int
    num_tokens: int
    label: str
    chat_ids: tuple[str, ...]

    @classmethod
    def from_json(cls, data: Json) -> SharedHead:
        return cls(
            integer(data, "num_blocks"),
            integer(data, "num_tokens"),
            sanitize_line(string(data, "label")) or "shared beginning",
            tuple(map(str, data.get("chat_ids") or ())),
        )


@dataclass(frozen=True)
class CacheReport:
    model: str = ""
    model_state: str = "no_model"
    kv_dtype: str = ""
    block_size: int = 16
    block_bytes: int = 0
    device: TierUse = field(default_factory=TierUse)
    host: TierUse | None = None
    disk: DiskUse = field(default_factory=DiskUse)
    computed_tokens_24h: int = 0
    prompt_tokens_24h: int = 0
    """Of a day, wherever they came from."""
    chains: tuple[Chain, ...] = ()
    shared: tuple[SharedHead, ...] = ()
    evicts_next: str = ""
    is_known: bool = False
    """False: no service has told of its cache yet."""

    @classmethod
    def from_json(cls, data: Json) -> CacheReport:
        tiers = mapping(data, "tiers")
        host, device = tiers.get("host"), TierUse.from_json(mapping(tiers, "device"))
        if block_bytes := integer(data, "block_bytes"):  # The pool is as large as its limit; this is what is in it.
            device = replace(device, num_blocks=device.used_bytes // block_bytes)
        return cls(
            sanitize_line(string(data, "model")),
            string(data, "model_state") or "no_model",
            sanitize_line(string(data, "kv_dtype")),
            integer(data, "block_size") or 16,
            block_bytes,
            device,
            TierUse.from_json(host) if isinstance(host, Mapping) else None,
            DiskUse.from_json(mapping(tiers, "disk")),
            integer(data, "computed_tokens_24h"),
            integer(data, "prompt_tokens_24h"),
            tuple(Chain.from_json(chain) for chain in data.get("chats") or ()),
            tuple(SharedHead.from_json(head) for head in data.get("shared") or ()),
            str(data.get("evicts_next") or ""),
            is_known=True,
        )

    @cached_property
    def by_chat(self) -> Mapping[str, Chain]:
        return {chain.chat_id: chain for chain in self.chains}


@dataclass(frozen=True)
class Miss:
    """Why a prompt was not reused further: where it first differs from what is kept."""

    position: int
    """In tokens of the prompt."""
    text_before: str = ""
    text: str = ""
    expected_text: str = ""
    """What is kept at that place; "" when nothing is, or when it is not known any more."""
    is_other_kept: bool = False
    """Something is kept at that place, whether or not it is known what."""

    @classmethod
    def from_json(cls, data: Any) -> Miss | None:
        if not isinstance(data, Mapping):
            return None
        expected_text = _visible(string(data, "expected_text"))
        return cls(
            integer(data, "position"),
            _visible(string(data, "text_before")),
            _visible(string(data, "text")),
            expected_text,
            bool(expected_text or data.get("is_other_kept")),
        )


@dataclass(frozen=True)
class Reuse:
    """What a request's prompt found in the cache."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int | None = None
    """Of the chat's earlier text, what was not found; None: not known, as for other clients' requests."""
    miss: Miss | None = None

    @classmethod
    def from_json(cls, data: Json) -> Reuse:
        num_recomputed = data.get("num_recomputed_tokens")
        return cls(
            integer(data, "num_prompt_tokens"),
            integer(data, "num_cached_tokens"),
            num_recomputed if isinstance(num_recomputed, int) else None,
            Miss.from_json(data.get("miss")),
        )

    @property
    def num_computed_tokens(self) -> int:
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)


def _runs(value: Any) -> Runs:
    try:
        return tuple((str(tier), int(count)) for tier, count in value or () if int(count) > 0)
    except (TypeError, ValueError):
        return ()


def _visible(text: str) -> str:
    """White space may be all that differs: what would break the line is spelled out, and nothing is trimmed."""
    return sanitize(text.replace("\n", "\\n").replace("\t", "\\t"))


def _optional_number(data: Json, key: str) -> float | None:
    return number(data, key) if isinstance(data.get(key), (int, float)) else None
