"""The slab files of a store and their rows: found, compared, opened, made and removed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from .cipher import Cipher
from .files import StoreFile
from .folder import StoreFolder
from .index import SlabRow, StoreIndex
from .rebuild import Progress, rebuild_rows
from .record import BadRecordError
from .slab import Slab
from .slab_header import SlabHeader, read_slab_header, write_slab_header

log = logging.getLogger(__name__)


class SlabSet:
    """The owner of the store sees to it that a slab is open only once. Methods raise OSError, BrokenIndexError."""

    def __init__(
        self, folder: StoreFolder, index: StoreIndex, key_id: bytes, cipher: Cipher | None, clock: Callable[[], float]
    ):
        self.cipher = cipher
        self._folder = folder
        self._index = index
        self._key_id = key_id
        self._clock = clock

    def reconcile(self, *, was_closed: bool, on_progress: Progress | None) -> None:
        """Make files and rows agree. The file is believed: rows of a slab whose file is of another moment are made
        again from its records.

        Args:
            was_closed: in good order, so that no slab holds what an interrupted write or delete has left.
        """
        row_of = {row.fingerprint: row for row in self._index.slabs()}
        for fingerprint in self._folder.slab_fingerprints():
            row = row_of.pop(fingerprint, None)
            with self.opened(fingerprint) as file:
                is_kept, is_changed = self._take_in(file, fingerprint, row, on_progress)
            if not is_kept:
                self._folder.remove_slab(fingerprint)
                if row is not None:
                    self._index.remove_slab(row.id)
            elif is_changed or not was_closed:
                self.open(fingerprint).close()
        for row in row_of.values():
            self._index.remove_slab(row.id)

    def _take_in(
        self, file: StoreFile, fingerprint: bytes, row: SlabRow | None, on_progress: Progress | None
    ) -> tuple[bool, bool]:
        """Whether the slab is worth keeping, and whether its rows had to be made again."""
        header = self._header_of(file, fingerprint, row)
        if header is None or (header.is_encrypted and row is None):
            return False, False
        is_current = (
            row is not None
            and row.payload_bytes == header.payload_bytes
            # One more: the last group was synced and not committed.
            and header.counter - row.counter in (0, 1)
        )
        if is_current:
            return True, False
        if header.is_encrypted:
            return False, False
        log.info("reading the records of %s anew: the index does not know them", fingerprint.hex())
        if row is not None:
            self._index.remove_slab(row.id)
        # A counter of no moment: if this is interrupted, the next opening begins again.
        row = self._index.add_slab(
            fingerprint, header.payload_bytes, header.model, header.content_sha256, counter=header.counter - 2
        )
        rebuild_rows(file, row, self._index, self._clock(), header.counter, on_progress)
        return True, True

    def _header_of(self, file: StoreFile, fingerprint: bytes, row: SlabRow | None) -> SlabHeader | None:
        """None: it is of another version, store or setting, or nobody can say what it is."""
        try:
            header = read_slab_header(file)
        except BadRecordError as error:
            log.warning("slab %s: %s", fingerprint.hex(), error)
            return None
        is_ours = (
            header.key_id == self._key_id
            and header.fingerprint == fingerprint
            and header.is_encrypted == (self.cipher is not None)
        )
        return header if is_ours else None

    @contextlib.contextmanager
    def opened(self, fingerprint: bytes) -> Iterator[StoreFile]:
        """Its file alone."""
        file = self._folder.files.open(self._folder.slab_path(fingerprint))
        try:
            yield file
        finally:
            file.close()

    def row(self, fingerprint: bytes) -> SlabRow | None:
        return next((row for row in self._index.slabs() if row.fingerprint == fingerprint), None)

    def open(self, fingerprint: bytes) -> Slab:
        """An existing one."""
        row = self.row(fingerprint)
        assert row is not None, "no such slab"
        file = self._folder.files.open(self._folder.slab_path(fingerprint))
        try:
            header = SlabHeader(
                self._key_id,
                fingerprint,
                row.payload_bytes,
                self.cipher is not None,
                row.model,
                row.content_sha256,
                row.counter,
            )
            return Slab(file, row, header, self._index, self.cipher)
        except BaseException:
            file.close()
            raise

    def open_or_create(self, fingerprint: bytes, payload_bytes: int, model: str, content_sha256: str) -> Slab:
        """For use by a model of this name. One with images of another size is emptied."""
        row = self.row(fingerprint)
        if row is not None and row.payload_bytes != payload_bytes:
            self.remove(row)
            row = None
        if row is None:
            return self.create(fingerprint, payload_bytes, model, content_sha256)
        self._index.touch_slab(row.id, model)
        return self.open(fingerprint)

    def create(self, fingerprint: bytes, payload_bytes: int, model: str, content_sha256: str) -> Slab:
        """An empty one; its file and name are safe before its row is."""
        header = SlabHeader(
            self._key_id, fingerprint, payload_bytes, self.cipher is not None, model, content_sha256, counter=0
        )
        with self.opened(fingerprint) as file:
            file.truncate(0)
            write_slab_header(file, header)
            file.datasync()
        self._folder.files.sync_dir(self._folder.path)
        self._index.add_slab(fingerprint, payload_bytes, model, content_sha256)
        return self.open(fingerprint)

    def remove(self, row: SlabRow) -> None:
        """A slab that is not open. The row first: what it names must be there."""
        self._index.remove_slab(row.id)
        self._folder.remove_slab(row.fingerprint)

    def allocated_bytes(self, fingerprint: bytes) -> int:
        return self._folder.files.allocated_bytes(self._folder.slab_path(fingerprint))
