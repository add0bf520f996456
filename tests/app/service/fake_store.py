"""The cache of the scripted engine, and a disk store in memory, with the contracts of the real ones.

Blocks are names only. A block that a chat brings to the device is stored at once, unless it is transient.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chatkv.app.service.store_port import Hooks
from chatkv.engine.errors import EngineError
from chatkv.engine.tiers.tier import TierStats


def hash_blocks(fingerprint: bytes, token_ids: Sequence[int]) -> list[bytes]:
    name, names = fingerprint, []
    for start in range(0, len(token_ids) - 15, 16):
        name = blake2b(name + repr(token_ids[start : start + 16]).encode(), digest_size=16).digest()
        names.append(name)
    return names


@dataclass
class FakeTier:
    """One fingerprint's blocks in the store."""

    store: FakeStore
    fingerprint: bytes
    model: str
    name: str = "disk"
    image_bytes: int = 4096
    hashes: set[bytes] = field(default_factory=set)
    is_open: bool = True
    unflushed: set[bytes] = field(default_factory=set)
    """Removed, and still in a file."""

    def put(self, owner: str, hashes: Sequence[bytes]) -> None:
        new = [block_hash for block_hash in hashes if block_hash not in self.hashes]
        if new and self.store.hooks is not None:
            self.store.hooks.on_owned(self.fingerprint, [(owner, block_hash) for block_hash in new])
        self.hashes |= set(new)

    def remove(self, hashes: Collection[bytes]) -> int:
        gone = self.hashes & set(hashes)
        self.hashes -= gone
        self.unflushed |= gone
        return len(gone)

    def flush(self, timeout_s: float) -> bool:
        self.unflushed.clear()
        return True

    def stats(self) -> TierStats:
        return TierStats(len(self.hashes), 0, len(self.hashes) * 4096, 1 << 20, 1e9, num_stored=len(self.hashes))

    def close(self) -> None:
        self.flush(1.0)
        self.is_open = False


@dataclass
class FakeStore:
    """Outlives services, as a directory does."""

    error: Exception | None = None
    """Why it cannot be opened."""
    tiers: dict[bytes, FakeTier] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    runs: dict[bytes, tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    damaged: set[bytes] = field(default_factory=set)
    hooks: Hooks | None = None
    quota_bytes: int = 0
    master_key: bytes | None = None
    num_clears: int = 0
    num_scrubs: int = 0
    scrub_error: OSError | None = None
    verify_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.verify_gate.set()

    def open(self, directory: Path, key: bytes, quota_bytes: int, master_key: bytes | None, hooks: Hooks) -> FakeStore:
        if self.error is not None:
            raise self.error
        self.hooks, self.quota_bytes, self.master_key = hooks, quota_bytes, master_key
        return self

    def tier_for(self, fingerprint: bytes, image_bytes: int, model: str, content_sha256: str) -> FakeTier:
        tier = self.tiers.setdefault(fingerprint, FakeTier(self, fingerprint, model))
        tier.is_open = True
        return tier

    def forget_elsewhere(
        self, fingerprint: bytes, hashes: Collection[bytes], shared: Collection[bytes]
    ) -> tuple[int, int]:
        tier = self.tiers.get(fingerprint)
        if tier is None:
            return 0, 0
        if tier.is_open:
            raise EngineError("an open tier is its engine's")
        num_removed = tier.remove(set(hashes) - set(shared))
        tier.flush(1.0)
        return num_removed, len(tier.hashes & set(shared))

    def scrub(self) -> None:
        self.num_scrubs += 1
        if self.scrub_error is not None:
            raise self.scrub_error

    def clear(self) -> int:
        self.num_clears += 1
        num_blocks = sum(len(tier.hashes) for tier in self._all())
        for tier in self.tiers.values():
            tier.hashes.clear()
            tier.unflushed.clear()
        self.runs.clear()
        return num_blocks

    def prune(self, installed_sha256: set[str]) -> Any:
        return SimpleNamespace(num_slabs=1, num_blocks=len(installed_sha256), freed_bytes=4096)

    def verify(self, on_progress: Callable[[int, int], None], is_cancelled: Callable[[], bool]) -> Any:
        hashes = [block_hash for tier in self.tiers.values() for block_hash in tier.hashes]
        for number, _ in enumerate(hashes, 1):
            on_progress(number, len(hashes))
            while not self.verify_gate.wait(0.002):
                if is_cancelled():
                    self.verify_gate.set()
        return SimpleNamespace(num_checked=len(hashes), num_damaged=len(self.damaged), damaged=self.damaged)

    def status(self) -> Any:
        slabs = [
            SimpleNamespace(
                model=tier.model, num_blocks=len(tier.hashes), bytes=4096, last_used=1.0, is_open=tier.is_open
            )
            for tier in self._all()
        ]
        used_bytes = sum(len(tier.hashes) for tier in self._all()) * 4096
        return SimpleNamespace(
            used_bytes=used_bytes, quota_bytes=self.quota_bytes, written_today_bytes=5, slabs=slabs, notice=None
        )

    def constant(self, name: str, default: Any = None) -> Any:
        return self.constants.get(name, default)

    def set_constant(self, name: str, value: Any) -> None:
        self.constants[name] = value

    def count_hits(self, tier: str, num_tokens: int) -> None:
        self.counts[tier] += num_tokens

    def count_computed(self, num_tokens: int) -> None:
        self.counts["computed"] += num_tokens

    def tokens_24h(self) -> Mapping[str, int]:
        return dict(self.counts)

    def find_run(self, key: bytes) -> tuple[int, ...] | None:
        return self.runs[key][1] if key in self.runs else None

    def put_run(self, fingerprint: bytes, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        self.runs[key] = (block_hash, tuple(token_ids))

    def close(self) -> None:
        self.hooks = None

    def _all(self) -> list[FakeTier]:
        return list(self.tiers.values())


class FakeCache:
    """The blocks of an engine: what it holds on the device, who owns it, and the tiers below."""

    def __init__(self, tiers: Sequence[FakeTier]):
        self.tiers = tiers
        self.device: set[bytes] = set()
        self.owners: dict[bytes, set[str]] = {}
        self.pinned: dict[str, set[bytes]] = {}

    def hold(self, owner: str, hashes: Sequence[bytes], is_transient: bool = False) -> None:
        self.device |= set(hashes)
        for block_hash in hashes:
            self.owners.setdefault(block_hash, set()).add(owner)
        for tier in () if is_transient else self.tiers:
            tier.put(owner, hashes)

    def forget(self, owner: str, owned: Collection[bytes], shared: Collection[bytes]) -> Any:
        mine = set(owned) | {name for name, owners in self.owners.items() if owner in owners}
        stay = {name for name in mine if name in shared or self.owners.get(name, set()) - {owner}}
        gone = mine - stay
        num_removed = len(gone & (self.device | {name for tier in self.tiers for name in tier.hashes}))
        self.device -= gone
        for tier in self.tiers:
            tier.remove(gone)
        for name in mine:
            self.owners.get(name, set()).discard(owner)
        return SimpleNamespace(num_removed=num_removed, num_shared=len(stay))

    def set_pinned(self, owner: str, hashes: Collection[bytes], is_pinned: bool) -> None:
        if is_pinned:
            self.pinned[owner] = set(hashes)
        else:
            self.pinned.pop(owner, None)

    def offload(self, hashes: Collection[bytes]) -> int:
        gone = self.device & set(hashes)
        self.device -= gone
        return len(gone)

    def drop_all(self) -> Any:
        num_removed = len(self.device)
        self.device.clear()
        return SimpleNamespace(num_removed=num_removed, num_shared=0)

    def place(self, block_hashes: Sequence[bytes]) -> Any:
        runs: list[tuple[str, int]] = []
        for name in block_hashes:
            below = [tier.name for tier in self.tiers if name in tier.hashes]
            place = "device" if name in self.device else next(iter(below), "missing")
            if runs and runs[-1][0] == place:
                runs[-1] = (place, runs[-1][1] + 1)
            else:
                runs.append((place, 1))
        return SimpleNamespace(num_by_run=runs, load_s=0.25, compute_s=4.0)
