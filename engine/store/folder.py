"""The store's directory: private, tagged, and holding nothing but the store."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import StoreUnavailableError
from .files import Files
from .index import INDEX_NAME
from .mounts import refuse_network

LOCK_NAME = "store.lock"
TAG_NAME = "CACHEDIR.TAG"
SLAB_SUFFIX = ".slab"
TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# Attention state of chats, kept by chatkv so that they resume at once. It can be made again: leave it out of backups.
# See https://bford.info/cachedir/
"""
_OWN_NAMES = frozenset({LOCK_NAME, TAG_NAME, INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"})
_IN_USE = {errno.EROFS: "it is read-only", errno.EACCES: "it may not be written to", errno.EPERM: "it may not be used"}


class StoreFolder:
    def __init__(self, path: Path, files: Files):
        self.path = path
        self.files = files

    @classmethod
    def prepare(cls, path: Path, files: Files) -> StoreFolder:
        """Make it, or see that it is fit. Raises StoreUnavailableError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            if status.st_uid != os.geteuid():
                raise StoreUnavailableError(
                    f"{path} belongs to another user. Remove it, or set CHATKV_HOME to a folder of your own."
                )
            refuse_network(path)
            if stat.S_IMODE(status.st_mode) & 0o077:
                path.chmod(0o700)
        except OSError as error:
            raise unavailable(path, error) from error
        return cls(path, files)

    def claim(self) -> None:
        """With the lock held: tag the folder as a cache. Raises StoreUnavailableError when it is not tagged and holds
        files of somebody else, OSError."""
        names = self.files.names(self.path)
        if TAG_NAME in names:
            return
        if strangers := [name for name in names if not self._is_own(name)]:
            raise StoreUnavailableError(
                f"{self.path} is not empty and not a cache of chatkv (it holds {strangers[0]}). "
                "Move that away, or set CHATKV_HOME to another folder."
            )
        file = self.files.open(self.path / TAG_NAME)
        try:
            file.pwrite([TAG], 0)
        finally:
            file.close()

    def slab_path(self, fingerprint: bytes) -> Path:
        return self.path / f"{fingerprint.hex()}{SLAB_SUFFIX}"

    def slab_fingerprints(self) -> list[bytes]:
        """Of the slab files that are there."""
        names = [name for name in self.files.names(self.path) if name.endswith(SLAB_SUFFIX) and self._is_own(name)]
        return [bytes.fromhex(name.removesuffix(SLAB_SUFFIX)) for name in names]

    def remove_slab(self, fingerprint: bytes) -> None:
        """Emptied first: after a power cut the name may be back. Raises OSError."""
        path = self.slab_path(fingerprint)
        file = self.files.open(path)
        try:
            file.truncate(0)
            file.datasync()
        finally:
            file.close()
        self.files.remove(path)
        self.files.sync_dir(self.path)

    def sweep(self) -> int:
        """Remove files that no part of the store has a use for (temporary ones, those of other versions); how many.
        The folder is claimed, so they are ours. Raises OSError."""
        strangers = [name for name in self.files.names(self.path) if not self._is_own(name)]
        strangers = [name for name in strangers if not (self.path / name).is_dir()]
        for name in strangers:
            self.files.remove(self.path / name)
        return len(strangers)

    def _is_own(self, name: str) -> bool:
        stem = name.removesuffix(SLAB_SUFFIX)
        return name in _OWN_NAMES or (stem != name and len(stem) == 64 and not set(stem) - set("0123456789abcdef"))


def unavailable(path: Path, error: OSError) -> StoreUnavailableError:
    why = _IN_USE.get(error.errno or 0, error.strerror or str(error))
    return StoreUnavailableError(
        f"The cache folder {path} cannot be used ({why}). "
        "Make it writable, free some space, or set CHATKV_HOME to another folder."
    )
