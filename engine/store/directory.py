"""The disk store as a whole: one directory, its owner, its slabs, and the tiers that are open on them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError
from ..tiers.disk_tier import DiskTier
from .answers import Answers
from .closed_slabs import ClosedSlabs
from .counters import COMPUTED
from .files import PAGE_BYTES, Files, OsFiles
from .opening import StoreParts, open_parts, translated
from .rebuild import Progress
from .slab import Slab
from .space import Space
from .status import PruneResult, SlabStatus, StoreStatus, VerifyResult
from .verify import Verification

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long closing waits for a write that hangs."""
OnOwned = Callable[[bytes, list[tuple[str, bytes]]], None]
PinnedIn = Callable[[bytes], Collection[bytes]]


class DiskStore:
    """Thread-safe. What lets the directory grow or takes slots holds `space.lock`, which also guards the list of open
    tiers. Methods may raise OSError and BrokenIndexError."""

    def __init__(
        self,
        parts: StoreParts,
        quota_bytes: int,
        clock: Callable[[], float],
        on_owned: OnOwned | None,
        pinned_in: PinnedIn,
    ):
        self.directory = parts.folder.path
        self.index = parts.index
        self.space = Space(parts.folder, parts.index, quota_bytes)
        self.clock = clock
        self.on_owned = on_owned
        """(fingerprint, (owner, block hash) pairs): called on the writer thread before these blocks are visible. When
        it raises, they never are; OwnersGoneError is no fault."""
        self.notice: str | None = None
        """What a person should know; written by whoever finds out."""
        self._parts = parts
        self._slabs = parts.slabs
        self._open: dict[bytes, tuple[DiskTier, Slab]] = {}
        self._answers = Answers(
            self.index, self.space, parts.slabs.cipher, lambda: [slab for _, slab in self._open.values()]
        )
        self._closed_slabs = ClosedSlabs(
            parts.slabs, self.index, self.space, clock, lambda fingerprint: fingerprint in self._open, pinned_in
        )
        self._is_closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        key: bytes,
        quota_bytes: int,
        *,
        master_key: bytes | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
        on_owned: OnOwned | None = None,
        pinned_in: PinnedIn | None = None,
        on_progress: Progress | None = None,
    ) -> DiskStore:
        """Take the directory, sweep what nobody can use, rebuild what the index lacks, shrink to the quota.

        Args:
            key: what block hashes are made with; a store made under another key is emptied.
            master_key: 32 bytes, to encrypt; a store of the other kind is emptied.
            pinned_in: fingerprint -> names of blocks that stay while no model of it is open.
            on_progress: (records read, records in all) while the index is rebuilt.

        Raises:
            StoreUnavailableError: it cannot be used, and why.
        """
        directory = Path(os.path.realpath(directory))  # A link has no size: the quota would hold back nothing.
        parts = open_parts(directory, key, master_key, files or OsFiles(), clock, on_progress)
        store = cls(parts, quota_bytes, clock, on_owned, pinned_in or (lambda _: ()))
        try:
            with translated(directory):
                store._shrink()
        except BaseException:
            parts.close(is_in_order=False)
            raise
        return store

    # Tiers

    def tier_for(self, fingerprint: bytes, image_bytes: int, model: str, content_sha256: str) -> DiskTier:
        """Open the tier of a fingerprint. `image_bytes` is a multiple of 4096; `model` is for people.

        Raises EngineError when it is open already, or the disk hangs."""
        assert image_bytes % PAGE_BYTES == 0, f"an image has whole pages, got {image_bytes} bytes"
        with self.space.locked():
            if fingerprint in self._open:
                raise EngineError(f"the stored blocks of {model} are in use already")
            self._closed_slabs.release()
            slab = self._slabs.open_or_create(fingerprint, image_bytes, model, content_sha256)
            slab.on_commit = self._answers.save
            try:
                tier = DiskTier(self, slab)
            except BaseException:
                slab.close()
                raise
            self._open[fingerprint] = tier, slab
            return tier

    def release(self, tier: DiskTier) -> None:
        """By the tier, when it closes: nothing of it uses the slab any more."""
        with self.space.lock:
            self._closed_slabs.release()  # there is one more now
            for fingerprint, (other, slab) in list(self._open.items()):
                if other is tier:
                    del self._open[fingerprint]
                    slab.close()

    def _tiers(self) -> list[DiskTier]:
        """Without the lock: a writer that hangs would hold it."""
        return [tier for tier, _ in list(self._open.values())]

    # Room

    def oldest_elsewhere(self, before_s: float = math.inf) -> float | None:
        """When the coldest block that may go was hit, among the slabs that are not open; None: not before `before_s`.
        0 where a slab in use has taken the place of its slab."""
        with self.space.lock:
            return self._closed_slabs.oldest(before_s)

    def evict_elsewhere(self, num_bytes: int) -> int:
        """Erase and punch the coldest leaves of slabs that are not open; bytes freed."""
        with self.space.lock:
            return self._closed_slabs.evict(num_bytes)

    def set_quota(self, quota_bytes: int) -> None:
        """Evicts until the directory fits, or nothing may be evicted. Waits for it."""
        self.space.set_quota(quota_bytes)
        self._shrink()

    def _shrink(self) -> None:
        """Models that are not in use go first."""
        while lack := self.space.lack_bytes(0, 0):
            if not self.evict_elsewhere(lack):
                break
        for tier in self._tiers():
            if lack := self.space.lack_bytes(0, 0):
                tier.shrink(lack)
        if self.space.lack_bytes(0, 0):
            with self.space.lock:
                self.index.database.rewrite()

    # Forget, prune, clear, verify

    def forget_elsewhere(
        self, fingerprint: bytes, hashes: Collection[bytes], shared: Collection[bytes]
    ) -> tuple[int, int]:
        """Forget blocks of a slab that is not open, with all below them; those `shared` with others stay, and what is
        above these. Nothing of the rest is in any file on return.

        Returns:
            How many blocks went, and how many of `hashes` stayed for others.
        Raises EngineError: a model uses the slab, so its engine has to forget them.
        """
        with self.space.lock:
            if fingerprint in self._open:
                raise EngineError("these blocks are in use: the running model has to forget them")
            self._answers.drop_unsaved(fingerprint)
            if self._slabs.row(fingerprint) is None:
                return 0, 0
            return self._closed_slabs.forget(fingerprint, hashes, shared)

    def scrub(self) -> None:
        """Blocks that were evicted are overwritten only when their room is needed. After this, nothing of them is in
        any file: for when a chat is forgotten some of whose blocks had been evicted before."""
        with self.space.lock:
            for _, slab in self._open.values():
                slab.punch_free()
            self._closed_slabs.punch_free()
            self.index.database.rewrite()

    def prune(self, installed_sha256: set[str]) -> PruneResult:
        """Remove the slabs of models that are not installed, and files that nobody needs."""
        with self.space.lock:
            before = self.space.used_bytes()
            removed = self._closed_slabs.remove(lambda row: row.content_sha256 not in installed_sha256)
            num_files = self._parts.folder.sweep()
            self.index.database.rewrite()
            freed_bytes = max(0, before - self.space.used_bytes())
        return PruneResult(len(removed), sum(removed), num_files, freed_bytes)

    def clear(self) -> int:
        """Everything goes, from every file; how many blocks. Copies of open tiers are GONE."""
        num_blocks = sum(self.index.num_blocks(row.id) for row in self.index.slabs())
        for tier in self._tiers():
            tier.drop_all()
        with self.space.lock:
            self._closed_slabs.remove(lambda _: True)
            for _, slab in self._open.values():
                slab.erase((), is_forgotten=True)
            self._answers.drop_unsaved()
            self._parts.folder.sweep()
            self.index.database.rewrite()
        return num_blocks

    def verify(self, on_progress: Callable[[int, int], None], is_cancelled: Callable[[], bool]) -> VerifyResult:
        """Read and prove every record; bad ones go. `on_progress`: (records read, records in all)."""
        check = Verification(self._slabs, self.index, on_progress, is_cancelled)
        for row in self.index.slabs():
            if bad := check.bad_slots(row):
                self._discard(row.fingerprint, bad)
        return check.result()

    def _discard(self, fingerprint: bytes, slots: Collection[int]) -> None:
        with self.space.lock:
            tier, _ = self._open.get(fingerprint, (None, None))
            if tier is None and self._slabs.row(fingerprint) is not None:
                self._closed_slabs.discard(fingerprint, slots)
        if tier is not None:
            tier.discard_slots(slots)

    # Numbers, and the runs of answers

    def constant(self, name: str, default: Any = None) -> Any:
        return self.index.constant(name, default)

    def set_constant(self, name: str, value: Any) -> None:
        """`value`: what JSON can hold, at most some kilobytes."""
        self.index.set_constant(name, value)

    def count_hits(self, tier: str, num_tokens: int) -> None:
        """`tier`: "device", "host" or "disk". In memory until something else is committed."""
        self.index.counters.add(tier, num_tokens)

    def count_computed(self, num_tokens: int) -> None:
        self.index.counters.add(COMPUTED, num_tokens)

    def tokens_24h(self) -> dict[str, int]:
        """By tier, and under "computed"."""
        return self.index.counters.tokens_24h()

    def put_run(self, fingerprint: bytes, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer's ids as long as the block in which it ends is stored; it may become so later. Does not wait
        for the writer. Not for chats that must not be on disk."""
        self._answers.put(fingerprint, key, block_hash, token_ids)

    def find_run(self, key: bytes) -> tuple[int, ...] | None:
        return self._answers.find(key)

    def runs(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """(key, ids) of all, the last used last."""
        return self._answers.all()

    # Life

    def status(self) -> StoreStatus:
        slabs = []
        for row in self.index.slabs():
            num_blocks, num_bytes = self.index.num_blocks(row.id), self._slabs.allocated_bytes(row.fingerprint)
            is_open = row.fingerprint in self._open
            slabs.append(SlabStatus(row.model, row.fingerprint, num_blocks, num_bytes, row.used_at_s, is_open))
        return StoreStatus(
            used_bytes=self.space.used_bytes(),
            quota_bytes=self.space.quota_bytes,
            written_today_bytes=self.index.counters.written_today_bytes(),
            slabs=tuple(slabs),
            notice=self.notice,
        )

    def close(self) -> None:
        """Closes open tiers too. The files stay."""
        if self._is_closed:
            return
        self._is_closed = True
        for tier in self._tiers():
            tier.close()
        if not self.space.lock.acquire(timeout=CLOSE_S):
            log.warning("the disk hangs: the store stays locked until this process ends")
            return
        try:
            self._closed_slabs.release()
            self._parts.close(is_in_order=not self._open)
        finally:
            self.space.lock.release()
