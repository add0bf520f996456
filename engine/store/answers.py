"""The ids of answers, kept as long as the block in which the answer ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from .cipher import Cipher
from .index import StoreIndex
from .pending_runs import PendingRun, PendingRuns
from .record import BadRecordError
from .runs import Run
from .slab import Slab
from .space import Space


class Answers:
    """Thread-safe. Methods raise OSError, BrokenIndexError."""

    def __init__(
        self, index: StoreIndex, space: Space, cipher: Cipher | None, open_slabs: Callable[[], Iterable[Slab]]
    ):
        """`open_slabs`: those that are written to now; asked with the lock of the space."""
        self._index = index
        self._space = space
        self._cipher = cipher
        self._open_slabs = open_slabs
        self._pending = PendingRuns()

    def put(self, fingerprint: bytes, key: bytes, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """In memory until `save` finds the block in the index. Does not wait for whoever writes."""
        self._pending.put([PendingRun(key, fingerprint, block_hash, array("I", token_ids).tobytes())])
        if self._space.lock.acquire(blocking=False):
            try:
                self.save()
            finally:
                self._space.lock.release()

    def find(self, key: bytes) -> tuple[int, ...] | None:
        ids = self._index.runs.find(key)
        return None if ids is None else self._opened(key, ids)

    def all(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """The last used last."""
        opened = ((key, self._opened(key, ids)) for key, ids in self._index.runs.all())
        return [(key, ids) for key, ids in opened if ids is not None]

    def save(self) -> None:
        """Write those that end in a block that an open slab has. What does not fit stays in memory."""
        with self._space.lock:
            for slab in self._open_slabs():
                runs = self._pending.of(slab.fingerprint)
                if not runs:
                    continue
                stored = self._index.present(slab.id, {run.block_hash for run in runs})
                ready = [run for run in runs if run.block_hash in stored]
                if not self._space.lack_bytes(sum(len(run.ids) for run in ready), 2 * len(ready)):
                    self._index.runs.put([self._sealed(run, slab.id) for run in ready])
                    self._pending.drop(ready)

    def drop_unsaved(self, fingerprint: bytes | None = None) -> None:
        """Of one fingerprint, or all."""
        if fingerprint is None:
            self._pending.clear()
        else:
            self._pending.drop(self._pending.of(fingerprint))

    def _sealed(self, run: PendingRun, slab_id: int) -> Run:
        ids = self._cipher.wrap_run(run.key, run.ids) if self._cipher else run.ids
        return Run(run.key, slab_id, run.block_hash, ids)

    def _opened(self, key: bytes, ids: bytes) -> tuple[int, ...] | None:
        """None: unreadable."""
        if self._cipher is not None:
            try:
                ids = self._cipher.unwrap_run(key, ids)
            except BadRecordError:
                return None
        return tuple(array("I", ids)) if len(ids) % array("I").itemsize == 0 else None
