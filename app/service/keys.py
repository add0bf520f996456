"""Secrets of this home: made once, readable by their owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from chatkv.app.errors import UserError


def read_or_make_api_key(file: Path) -> str:
    """The bearer key of the TCP socket."""
    return _read_or_make(file, lambda: f"chatkv-{secrets.token_urlsafe(32)}".encode()).decode("ascii", "replace")


def read_or_make_store_key(file: Path) -> bytes:
    """32 random bytes that key the block hashes. A file of another length is replaced: its cache is stale anyway."""
    return _read_or_make_bytes(file)


def read_or_make_kv_key(file: Path) -> bytes:
    """32 random bytes that the disk store is encrypted with, where that is wished."""
    return _read_or_make_bytes(file)


def _read_or_make_bytes(file: Path) -> bytes:
    key = _read_or_make(file, lambda: secrets.token_bytes(32), strip=False)
    if len(key) != 32:
        file.unlink()
        key = _read_or_make(file, lambda: secrets.token_bytes(32), strip=False)
    return key


def _read_or_make(file: Path, make, strip: bool = True) -> bytes:  # type: ignore[no-untyped-def]
    try:
        key = file.read_bytes()
        key = key.strip() if strip else key
        if key:
            file.chmod(0o600)
            return key
        file.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"Cannot read {file}: {error.strerror}.", "Make it readable, or remove it.") from error
    key = make()
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as out:
        out.write(key + (b"\n" if strip else b""))
    partial.rename(file)
    return key
