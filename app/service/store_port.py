"""What the service asks of a disk store, and the store of the service."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chatkv.engine.errors import EngineError
from chatkv.engine.store.index_db import BrokenIndexError
from chatkv.engine.tiers.tier import LowerTier

STORE_ERRORS = (EngineError, OSError, BrokenIndexError)
"""What any use of the store may raise."""


class Store(Protocol):
    """`chatkv.engine.store.directory.DiskStore`. Every method may take long; all are called in worker threads."""

    def tier_for(self, fingerprint: bytes, image_bytes: int, model: str, content_sha256: str) -> LowerTier: ...

    def forget_elsewhere(
        self, fingerprint: bytes, hashes: Collection[bytes], shared: Collection[bytes]
    ) -> tuple[int, int]:
        """Remove blocks, and those below them, of a fingerprint whose tier is not open -> (num_removed, num_shared)."""
        ...

    def scrub(self) -> None:
        """Overwrite what evicted blocks have left in files."""
        ...

    def clear(self) -> Any: ...

    def prune(self, installed_sha256: set[str]) -> Any: ...

    def verify(self, on_progress: Callable[[int, int], None], is_cancelled: Callable[[], bool]) -> Any: ...

    def status(self) -> Any: ...

    def constant(self, name: str, default: Any = None) -> Any: ...

    def set_constant(self, name: str, value: Any) -> None: ...

    def count_hits(self, tier: str, num_tokens: int) -> None: ...

    def count_computed(self, num_tokens: int) -> None: ...

    def tokens_24h(self) -> Mapping[str, int]: ...

    def find_run(self, key: bytes) -> Sequence[int] | None: ...

    def put_run(self, fingerprint: bytes, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the store asks of the chats, on threads of its own."""

    on_owned: Callable[[bytes, Sequence[tuple[str, bytes]]], None]
    """(fingerprint, (owner, block hash) pairs): before blocks can be seen; raises when they must not be."""
    pinned_in: Callable[[bytes], Collection[bytes]]
    """Fingerprint -> blocks of pinned chats."""
    owners_id: Callable[[], str]
    """Names the life of the owner rows."""


OpenStore = Callable[[Path, bytes, int, bytes | None, Hooks], Store]
"""(directory, store key, quota in bytes, key to encrypt with, hooks) -> store. Raises StoreUnavailableError."""
