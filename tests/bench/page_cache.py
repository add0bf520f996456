"""The system's cache of files, out of the way of a measurement."""

from __future__ import annotations

import os
from pathlib import Path


def drop_page_cache(folder: Path) -> None:
    """What lies below `folder` must be read from the disk again."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
