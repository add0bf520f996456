"""The quota: every byte that the file system has given to the directory counts, before and after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import EngineError
from .folder import StoreFolder
from .index import StoreIndex
from .index_db import INDEX_RESERVE_BYTES

__all__ = ["INDEX_RESERVE_BYTES", "Space"]


HANG_S = 30.0
"""A group of blocks on a slow disk takes less."""


class Space:
    """Whoever lets the directory grow holds `lock` from `lack_bytes` until what was asked for is on the disk.

    The index may always write INDEX_RESERVE_BYTES into its WAL (it must, to delete), so they are kept free of blocks:
    a quota that is hardly larger holds nothing."""

    def __init__(self, folder: StoreFolder, index: StoreIndex, quota_bytes: int):
        self.lock = threading.RLock()
        self._folder = folder
        self._index = index
        self._quota_bytes = quota_bytes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock, for those who cannot wait for ever. Raises EngineError: whoever has it does not come back."""
        if not self.lock.acquire(timeout=HANG_S):
            raise EngineError("the disk does not answer")
        try:
            yield
        finally:
            self.lock.release()

    @property
    def quota_bytes(self) -> int:
        return self._quota_bytes

    def set_quota(self, quota_bytes: int) -> None:
        """Of what is to come: nothing is evicted by this."""
        with self.lock:
            self._quota_bytes = quota_bytes

    def used_bytes(self) -> int:
        """Measured now. Raises OSError."""
        return self._folder.files.allocated_bytes(self._folder.path)

    def lack_bytes(self, new_bytes: int, num_rows: int) -> int:
        """How many bytes have to be freed before a group fits; 0: it does. Raises OSError, BrokenIndexError.

        Args:
            new_bytes: what its records will newly allocate in slabs.
            num_rows: its index rows.
        """
        files, path = self._folder.files, self._index.database.path
        index_bytes = files.allocated_bytes(path)
        wal_bytes = files.allocated_bytes(path.with_name(f"{path.name}-wal"))
        # The WAL counts as if it were full; the index with what the WAL will bring into it, and twice: to forget, it is
        # written anew beside the old one.
        total_bytes = (
            self.used_bytes()
            - index_bytes
            - wal_bytes
            + 2 * max(index_bytes, self._index.database.file_bytes)
            + INDEX_RESERVE_BYTES
            + (self._index.growth_bytes(num_rows) if num_rows else 0)
            + new_bytes
        )
        return max(0, total_bytes - self._quota_bytes)
