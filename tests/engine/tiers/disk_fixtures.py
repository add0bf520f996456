"""A disk tier in a folder, with a clock and a disk that a test holds in its hands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

from slow_files import SlowFiles
from tier_blocks import IMAGE_BYTES, WAIT_S, Changes, load_all, store_chain

from chatkv.engine.store import directory
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.tier import BlockRecord, CopyState, TierCopy

KEY = b"k" * 32
FINGERPRINT = b"f" * 32
QUOTA_BYTES = 16 << 20


class Disk:
    """`open` gives a tier; the one before is closed. Groups are written when flushed or large: the clock stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = SlowFiles()
        self.changes = Changes()
        self.up_s = 1000.0
        self.wall_s = 1_900_000_000.0
        self.owned: list[tuple[str, bytes]] = []
        self.on_owned_error: Exception | None = None
        self._store: DiskStore | None = None
        self._tier: DiskTier | None = None

    @property
    def store(self) -> DiskStore:
        assert self._store is not None
        return self._store

    @property
    def tier(self) -> DiskTier:
        assert self._tier is not None
        return self._tier

    def open(
        self,
        quota_bytes: int = QUOTA_BYTES,
        *,
        fingerprint: bytes = FINGERPRINT,
        image_bytes: int = IMAGE_BYTES,
        queue_blocks: int = 64,
        window_blocks: int = 8,
    ) -> DiskTier:
        self.close()
        make_tier = partial(
            DiskTier,
            queue_bytes=queue_blocks * image_bytes,
            group_bytes=queue_blocks * image_bytes,
            window_bytes=window_blocks * image_bytes,
            monotonic=lambda: self.up_s,
        )
        self._store = DiskStore.open(
            self.folder, KEY, quota_bytes, files=self.files, clock=lambda: self.wall_s, on_owned=self._own
        )
        with patch.object(directory, "DiskTier", make_tier):
            self._tier = self._store.tier_for(fingerprint, image_bytes, "tiny", fingerprint.hex())
        self._tier.on_change = self.changes
        return self._tier

    def save(self, records: Sequence[BlockRecord], owner: str = "", is_pinned: bool = False) -> list[TierCopy]:
        """Stores a chain and waits until it is on disk; the copies that came to be."""
        copies = store_chain(self.tier, records, owner, is_pinned)
        assert self.tier.flush(WAIT_S)
        return [copy for copy in copies if copy.state is CopyState.STORED]

    def load(self, copies: Sequence[TierCopy]) -> list[bytes]:
        return load_all(self.tier.start_load(copies, WAIT_S), self.changes)

    def pass_days(self, num_days: float) -> None:
        self.wall_s += num_days * 24 * 3600
        self.up_s += num_days * 24 * 3600

    def pass_back_off(self) -> None:
        self.up_s += 3600.0

    @property
    def used_bytes(self) -> int:
        """Of everything in the folder, as anybody can measure it."""
        return sum(path.lstat().st_blocks * 512 for path in [self.folder, *self.folder.rglob("*")])

    def contains(self, wanted: bytes) -> bool:
        """Whether any file has these bytes."""
        return any(wanted in path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self.files.release_all()
        if self._tier is not None:
            self._tier.close()
        if self._store is not None:
            self._store.close()
        self._store = self._tier = None

    def _own(self, fingerprint: bytes, pairs: Sequence[tuple[str, bytes]]) -> None:
        if self.on_owned_error is not None:
            raise self.on_owned_error
        self.owned.extend(pairs)
