"""A disk store for the time of a check, where its libraries are installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chatkv.engine.tiers.tier import LowerTier

from .asking import KEY

_PACKAGES = ("xxhash", "cryptography")
"""What the store needs beside torch."""
NO_STORE = f"needs {' and '.join(_PACKAGES)}"
_QUOTA_BYTES = 8 << 30


def has_store() -> bool:
    try:
        for package in _PACKAGES:
            importlib.import_module(package)
    except ImportError:
        return False
    return True


@contextmanager
def opened_tier(folder: Path, image_bytes: int) -> Iterator[LowerTier]:
    from chatkv.engine.store.directory import DiskStore

    store = DiskStore.open(folder / "store", KEY, _QUOTA_BYTES)
    try:
        tier = store.tier_for(b"f" * 32, image_bytes, "gpu-check", "0" * 64)
        assert tier is not None, "a new store has room"
        yield tier
    finally:
        store.close()
