"""chatkv.json, as far as the engine reads and writes it: whether the weights are those that were imported."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "chatkv.json"


def has_unchanged_weights(native_dir: Path) -> bool:
    """Whether size and mtime of the weights are those that were recorded at import."""
    try:
        recorded = _read(native_dir)["files"][WEIGHTS_FILE]
        status = (native_dir / WEIGHTS_FILE).stat()
        return (recorded["size"], recorded["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def lacks_weights_record(native_dir: Path) -> bool:
    """Whether there is a manifest that says nothing of the weights: `replace_weights` was cut short."""
    try:
        return WEIGHTS_FILE not in _read(native_dir)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def replace_weights(native_dir: Path, written: Path) -> None:
    """Put `written`, synced already, in the place of the weights, whatever kills us on the way.

    The manifest says nothing of the weights between two renames: at each moment it fits the files that are there, and
    weights that it does not list are checked by their content hash when they are loaded.
    """
    _record(native_dir, None)
    written.replace(native_dir / WEIGHTS_FILE)
    sync(native_dir)
    record_weights(native_dir)


def record_weights(native_dir: Path) -> None:
    """Note size, mtime and SHA-256 of the weights in the manifest, where there is one."""
    file = native_dir / WEIGHTS_FILE
    status = file.stat()
    _record(native_dir, {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": _sha256(file)})


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _record(native_dir: Path, weights: dict[str, Any] | None) -> None:
    try:
        manifest = _read(native_dir)
        files = {name: facts for name, facts in manifest["files"].items() if name != WEIGHTS_FILE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # Nothing that could come to be wrong.
    if weights is not None:
        files[WEIGHTS_FILE] = weights
        manifest["size_bytes"] = sum(facts["size"] for facts in files.values())
    temporary = native_dir / f"{MANIFEST_FILE}.new"
    temporary.write_text(json.dumps({**manifest, "files": files}, indent=1), "utf-8")
    sync(temporary)
    temporary.replace(native_dir / MANIFEST_FILE)
    sync(native_dir)


def _read(native_dir: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((native_dir / MANIFEST_FILE).read_text("utf-8"))
    return manifest


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
