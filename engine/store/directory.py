"""The disk store as a whole: one directory, its owner, its slabs, and the tiers that are open on them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import EngineError, StoreUnavailableError
from ..tiers.disk_tier import DiskTier
from .cipher import Cipher
from .cold import ColdLeaves, ColdSlab
from .counters import COMPUTED_TOKENS, HIT_TOKENS
from .files import PAGE_BYTES, Files, OsFiles
from .folder import LOCK_NAME, StoreFolder, unavailable
from .index import INDEX_NAME, BrokenIndexError, SlabRow, StoreIndex, open_or_replace
from .lock import StoreLock
from .pending_runs import PendingRun, PendingRuns
from .rebuild import Progress
from .record import BadRecordError
from .runs import Run
from .slab import Slab
from .slab_header import KEY_ID_BYTES
from .slab_set import SlabSet
from .space import Space
from .status import PruneResult, SlabStatus, StoreStatus, VerifyResult
from .verify import bad_slots

log = logging.getLogger(__name__)

_IS_OPEN = "is_open"
OnOwned = Callable[[bytes, list[tuple[str, bytes]]], None]


class DiskStore:
    """Thread-safe. What lets the directory grow or takes slots holds `space.lock`, which also guards the list of open
    tiers. Methods may raise OSError and BrokenIndexError."""

    def __init__(
        self,
        lock: StoreLock,
        folder: StoreFolder,
        index: StoreIndex,
        slabs: SlabSet,
        space: Space,
        clock: Callable[[], float],
        on_owned: OnOwned | None,
        pinned_in: Callable[[bytes], Collection[bytes]] | None,
    ):
        self.directory = folder.path
        self.index = index
        self.space = space
        self.clock = clock
        self.on_owned = on_owned
        """(fingerprint, (owner, block hash) pairs): called on the writer thread before these blocks are visible. When
        it raises, they never are."""
        self.pinned_in = pinned_in
        """Fingerprint -> names of blocks that must not be evicted while no model of it is open."""
        self.notice: str | None = None
        """What a person should know; written by whoever finds out."""
        self._lock = lock
        self._folder = folder
        self._slabs = slabs
        self._pending = PendingRuns()
        self._open: dict[bytes, tuple[DiskTier, Slab]] = {}
        self._cold: ColdLeaves | None = None
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
        pinned_in: Callable[[bytes], Collection[bytes]] | None = None,
        on_progress: Progress | None = None,
    ) -> DiskStore:
        """Take the directory, sweep what nobody can use, rebuild what the index lacks, shrink to the quota.

        Args:
            key: what block hashes are made with; a store made under another key is emptied.
            master_key: 32 bytes, to encrypt; a store of the other kind is emptied.
            on_progress: (records read, records in all) while the index is rebuilt.

        Raises:
            StoreUnavailableError: it cannot be used, and why.
        """
        files = files or OsFiles()
        key_id = hashlib.blake2b(b"store", key=key, digest_size=KEY_ID_BYTES).digest()
        lock: StoreLock | None = None
        with contextlib.ExitStack() as undo:
            try:
                folder = StoreFolder.prepare(directory, files)
                lock = StoreLock.take(directory / LOCK_NAME)
                undo.callback(lock.release)
                folder.claim()
                index, reason = open_or_replace(directory / INDEX_NAME, files, key_id.hex(), clock)
                undo.callback(index.database.close)
                if reason is not None:
                    log.warning("a new index: %s", reason)
                folder.sweep()
                slabs = SlabSet(folder, index, key_id, Cipher(master_key) if master_key else None, clock)
                was_closed = index.constant(_IS_OPEN) is False
                index.set_constant(_IS_OPEN, True, is_durable=True)
                slabs.reconcile(was_closed=was_closed, on_progress=on_progress)
                space = Space(folder, index, quota_bytes)
                store = cls(lock, folder, index, slabs, space, clock, on_owned, pinned_in)
                store._shrink()
                files.sync_dir(directory)
            except OSError as error:
                raise unavailable(directory, error) from error
            except BrokenIndexError as error:
                raise StoreUnavailableError(
                    f"The index of the cache in {directory} breaks ({error}): chats are kept in memory only. "
                    "Check the disk, remove the folder, and start again."
                ) from error
            undo.pop_all()
        return store

    # Tiers

    def tier_for(self, fingerprint: bytes, image_bytes: int, model: str, content_sha256: str) -> DiskTier:
        """Open the tier of a fingerprint. `image_bytes` is a multiple of 4096; `model` is for people.

        Raises EngineError when it is open already."""
        assert image_bytes % PAGE_BYTES == 0, f"an image has whole pages, got {image_bytes} bytes"
        with self.space.lock:
            if fingerprint in self._open:
                raise EngineError(f"the stored blocks of {model} are in use already")
            self._end_cold()
            row = self._slabs.row(fingerprint)
            if row is not None and row.payload_bytes != image_bytes:
                self._slabs.remove(row)
                row = None
            if row is None:
                slab = self._slabs.create(fingerprint, image_bytes, model, content_sha256)
            else:
                self.index.touch_slab(row.id, model)
                slab = self._slabs.open(fingerprint)
            slab.on_commit = self.save_pending
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
            for fingerprint, (other, slab) in list(self._open.items()):
                if other is tier:
                    del self._open[fingerprint]
                    slab.close()

    # Room

    def oldest_elsewhere(self) -> float | None:
        """When the coldest block that may go was hit, among the slabs that are not open; None: none."""
        with self.space.lock:
            return self._cold_leaves().oldest()

    def evict_elsewhere(self, num_bytes: int) -> int:
        """Erase and punch the coldest leaves of slabs that are not open; bytes freed."""
        with self.space.lock:
            before = self.space.used_bytes()
            emptied = [cold for cold in self._cold_leaves().evict(num_bytes) if not cold.copies]
            if emptied:
                fingerprints = {cold.slab.fingerprint for cold in emptied}
                self._end_cold()
                self._remove_slabs(lambda row: row.fingerprint in fingerprints)
            return max(0, before - self.space.used_bytes())

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
                self._end_cold()
                self.index.database.give_back_free_pages()

    def _cold_leaves(self) -> ColdLeaves:
        if self._cold is None:
            slabs = [
                ColdSlab(self._slabs.open(row.fingerprint))
                for row in self.index.slabs()
                if row.fingerprint not in self._open
            ]
            self._cold = ColdLeaves(slabs, self._pinned, self.clock())
        return self._cold

    def _pinned(self, fingerprint: bytes) -> Collection[bytes]:
        return set(self.pinned_in(fingerprint)) if self.pinned_in else ()

    def _end_cold(self) -> None:
        if self._cold is not None:
            self._cold.close()
            self._cold = None

    @contextlib.contextmanager
    def _cold_slab(self, fingerprint: bytes) -> Iterator[ColdSlab]:
        """With the lock: one slab that is not open."""
        self._end_cold()
        cold = ColdSlab(self._slabs.open(fingerprint))
        try:
            yield cold
        finally:
            cold.slab.close()

    def _remove_slabs(self, is_unwanted: Callable[[SlabRow], bool]) -> list[int]:
        """With the lock: those that are not open; how many blocks each had."""
        self._end_cold()
        removed = []
        for row in self.index.slabs():
            if row.fingerprint not in self._open and is_unwanted(row):
                removed.append(self.index.num_blocks(row.id))
                self._slabs.remove(row)
        return removed

    def _tiers(self) -> list[DiskTier]:
        with self.space.lock:
            return [tier for tier, _ in self._open.values()]

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
            self._pending.drop(self._pending.of(fingerprint))
            if self._slabs.row(fingerprint) is None:
                return 0, 0
            with self._cold_slab(fingerprint) as cold:
                kept = cold.with_parents(cold.named(shared))
                named = cold.named(hashes)
                gone = cold.with_children(copy for copy in named if copy.record.block_hash not in kept) - kept
                cold.erase(gone, is_forgotten=True)
                return len(gone), sum(copy.record.block_hash in kept for copy in named)

    def prune(self, installed_sha256: set[str]) -> PruneResult:
        """Remove the slabs of models that are not installed, and files that nobody needs."""
        with self.space.lock:
            before = self.space.used_bytes()
            removed = self._remove_slabs(lambda row: row.content_sha256 not in installed_sha256)
            num_files = self._folder.sweep()
            self.index.database.give_back_free_pages()
            freed_bytes = max(0, before - self.space.used_bytes())
        return PruneResult(len(removed), sum(removed), num_files, freed_bytes)

    def clear(self) -> int:
        """Everything goes, from every file; how many blocks. Copies of open tiers are GONE."""
        tiers = self._tiers()
        num_blocks = sum(self.index.num_blocks(row.id) for row in self.index.slabs())
        for tier in tiers:
            tier.drop_all()
        with self.space.lock:
            self._remove_slabs(lambda _: True)
            for _, slab in self._open.values():
                slab.erase((), is_forgotten=True)
            self._pending.clear()
            self._folder.sweep()
            self.index.database.give_back_free_pages()
        return num_blocks

    def verify(self, on_progress: Callable[[int, int], None], is_cancelled: Callable[[], bool]) -> VerifyResult:
        """Read and prove every record; bad ones go. `on_progress`: (records read, records in all)."""
        rows = self.index.slabs()
        num_blocks = sum(self.index.num_blocks(row.id) for row in rows)
        num_checked = 0
        damaged: set[bytes] = set()

        def on_checked() -> None:
            nonlocal num_checked
            num_checked += 1
            on_progress(num_checked, max(num_blocks, num_checked))

        for row in rows:
            path = self._folder.slab_path(row.fingerprint)
            file = self._folder.files.open(path)
            try:
                bad = bad_slots(file, row, self.index, self._slabs.cipher, on_checked, is_cancelled)
            finally:
                file.close()
            damaged.update(bad.values())
            if bad:
                self._discard(row.fingerprint, bad)
        return VerifyResult(num_checked, len(damaged), frozenset(damaged), not is_cancelled())

    def _discard(self, fingerprint: bytes, slots: Collection[int]) -> None:
        with self.space.lock:
            tier, _ = self._open.get(fingerprint, (None, None))
            if tier is None and self._slabs.row(fingerprint) is not None:
                with self._cold_slab(fingerprint) as cold:
                    cold.erase(cold.with_children(cold.at(slots)), is_forgotten=False)
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
        self.index.counters.add(HIT_TOKENS + tier, num_tokens)

    def count_computed(self, num_tokens: int) -> None:
        self.index.counters.add(COMPUTED_TOKENS, num_tokens)

    def tokens_24h(self) -> dict[str, int]:
        """By tier, and under "computed"."""
        sums = self.index.counters.tokens_24h()
        return {name.removeprefix(HIT_TOKENS).removesuffix("_tokens"): amount for name, amount in sums.items()}

    def put_run(self, fingerprint: bytes, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer's ids as long as the block in which it ends is stored; it may become so later. Never waits for
        the disk. Not for chats that must not be on disk."""
        self._pending.put([PendingRun(key, fingerprint, block_hash, array("I", token_ids).tobytes())])
        if self.space.lock.acquire(blocking=False):
            try:
                self.save_pending()
            finally:
                self.space.lock.release()

    def find_run(self, key: bytes) -> tuple[int, ...] | None:
        ids = self.index.runs.find(key)
        return None if ids is None else self._open_run(key, ids)

    def runs(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """(key, ids) of all, the last used last."""
        opened = ((key, self._open_run(key, ids)) for key, ids in self.index.runs.all())
        return [(key, ids) for key, ids in opened if ids is not None]

    def save_pending(self) -> None:
        """Write the runs whose block is stored, and the counters. What does not fit stays in memory."""
        with self.space.lock:
            for fingerprint, (_, slab) in self._open.items():
                runs = self._pending.of(fingerprint)
                if not runs:
                    continue
                stored = self.index.present(slab.id, {run.block_hash for run in runs})
                ready = [run for run in runs if run.block_hash in stored]
                if self.space.lack_bytes(sum(len(run.ids) for run in ready), 2 * len(ready)):
                    continue
                self.index.runs.put([self._sealed(run, slab.id) for run in ready])
                self._pending.drop(ready)

    def _sealed(self, run: PendingRun, slab_id: int) -> Run:
        cipher = self._slabs.cipher
        ids = cipher.wrap_run(run.key, run.ids) if cipher else run.ids
        return Run(run.key, slab_id, run.block_hash, ids)

    def _open_run(self, key: bytes, ids: bytes) -> tuple[int, ...] | None:
        if self._slabs.cipher is not None:
            try:
                ids = self._slabs.cipher.unwrap_run(key, ids)
            except BadRecordError:
                return None
        return tuple(array("I", ids)) if len(ids) % 4 == 0 else None

    # Life

    def status(self) -> StoreStatus:
        rows = self.index.slabs()
        open_ones = set(self._open)
        return StoreStatus(
            used_bytes=self.space.used_bytes(),
            quota_bytes=self.space.quota_bytes,
            written_today_bytes=self.index.counters.written_today_bytes(),
            slabs=tuple(
                SlabStatus(
                    row.model,
                    row.fingerprint,
                    self.index.num_blocks(row.id),
                    self._slabs.allocated_bytes(row.fingerprint),
                    row.used_at_s,
                    row.fingerprint in open_ones,
                )
                for row in rows
            ),
            notice=self.notice,
        )

    def close(self) -> None:
        """Closes open tiers too. The files stay."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for tier in self._tiers():
                tier.close()
            with self.space.lock:
                self._end_cold()
                self.index.set_constant(_IS_OPEN, bool(self._open))
        except (OSError, BrokenIndexError) as error:
            log.warning("the store was not closed in good order: %s", error)
        finally:
            try:
                self.index.close()
            except (OSError, BrokenIndexError) as error:
                log.warning("the index was not closed in good order: %s", error)
            self._lock.release()
