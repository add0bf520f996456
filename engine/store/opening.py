"""How a store comes up: its directory taken, swept, and made to agree with its index."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreUnavailableError
from .cipher import Cipher
from .files import Files
from .folder import LOCK_NAME, StoreFolder, unavailable
from .index import INDEX_NAME, BrokenIndexError, StoreIndex, open_or_replace
from .lock import StoreLock
from .rebuild import Progress
from .slab_header import KEY_ID_BYTES
from .slab_set import SlabSet

log = logging.getLogger(__name__)

_IS_OPEN = "is_open"


@dataclass(frozen=True, slots=True)
class StoreParts:
    lock: StoreLock
    folder: StoreFolder
    index: StoreIndex
    slabs: SlabSet

    def close(self, *, is_in_order: bool) -> None:
        """`is_in_order`: nothing is under way, so the next opening need not look for what was left half done."""
        try:
            if is_in_order:
                self.index.set_constant(_IS_OPEN, False)
            self.index.close()
        except (OSError, BrokenIndexError) as error:
            log.warning("the store was not closed in good order: %s", error)
        self.lock.release()


def open_parts(
    directory: Path,
    key: bytes,
    master_key: bytes | None,
    files: Files,
    clock: Callable[[], float],
    on_progress: Progress | None,
) -> StoreParts:
    """Raises StoreUnavailableError."""
    key_id = hashlib.blake2b(b"store", key=key, digest_size=KEY_ID_BYTES).digest()
    with translated(directory), contextlib.ExitStack() as undo:
        folder = StoreFolder.prepare(directory, files)
        lock = StoreLock.take(directory / LOCK_NAME)
        undo.callback(lock.release)
        folder.claim()
        index, reason = open_or_replace(directory / INDEX_NAME, files, key_id.hex(), clock)
        undo.callback(index.database.close)
        if reason is not None:
            log.warning("the index is made anew: %s", reason)
        folder.sweep()
        slabs = SlabSet(folder, index, key_id, Cipher(master_key) if master_key else None, clock)
        was_closed = index.constant(_IS_OPEN) is False
        index.set_constant(_IS_OPEN, True, is_durable=True)
        slabs.reconcile(was_closed=was_closed, on_progress=on_progress)
        files.sync_dir(directory)
        undo.pop_all()
    return StoreParts(lock, folder, index, slabs)


@contextlib.contextmanager
def translated(directory: Path) -> Iterator[None]:
    """What goes wrong while a store comes up, in words for people."""
    try:
        yield
    except OSError as error:
        raise unavailable(directory, error) from error
    except BrokenIndexError as error:
        raise StoreUnavailableError(
            f"The index of the cache in {directory} breaks ({error}). "
            "Check the disk, remove the folder, and start again."
        ) from error
