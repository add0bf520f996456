"""Turns fetched weights into an installed model: written beside the others under a hidden name, flushed to disk, and
only then renamed. A kill at any point leaves a hidden folder that the next start sweeps, never half a model."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..paths import Paths, make_private_dir
from .installed import (
    FORMAT_VERSION,
    INSTALLING_PREFIX,
    MANIFEST,
    REMOVING_PREFIX,
    InstalledModel,
    find_installed,
    get_installed,
    set_aside,
)
from .native_text import NativeText, write_native_text
from .reports import IsCancelled, OnBytes, PullCancelled

_CHUNK_BYTES = 1 << 20


class UnusableWeightsError(UserError):
    """These weights are broken or of a kind that the engine does not know: no other try will help."""


@dataclass(frozen=True)
class Provenance:
    """Where a model came from, for its manifest."""

    source: str
    licence: str | None
    """None: what the weights themselves say, else unknown."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the catalogue recommends for this model."""


def install(
    paths: Paths, name: str, weights: Path, provenance: Provenance, on_bytes: OnBytes, is_cancelled: IsCancelled
) -> InstalledModel:
    """Import `weights` (a .gguf file or a Hugging Face directory) as the model `name`.

    Raises:
        UnusableWeightsError: broken or unsupported weights; nothing is written then.
        UserError: no space, no permission.
        PullCancelled: the person stopped it.
    """
    from chatkv.engine.errors import EngineError
    from chatkv.engine.models.native import write_weights
    from chatkv.engine.models.source import open_source
    from chatkv.engine.text.tokenizer import Tokenizer

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        if is_cancelled():
            raise PullCancelled
        on_bytes(done_bytes, total_bytes)

    try:
        source = open_source(weights)  # refuses by name, before anything is written
        with _installing_folder(paths, name) as folder:
            text = _write_text(weights, folder, provenance, source.hf_config)
            Tokenizer.from_dir(folder)  # refuses a tokenizer that the engine could not use, now and not at the start
            info = write_weights(source, folder, on_progress)
            manifest = {
                "format_version": FORMAT_VERSION,
                "name": name,
                "source": provenance.source,
                "licence": provenance.licence or text.licence or "unknown",
                "content_sha256": info.content_sha256,
                "weight_format": info.weight_format,
                "num_params": info.num_params,
                "context_tokens": int(source.hf_config["max_position_embeddings"]),
                "eos_token_ids": list(text.eos_token_ids),
                "bos_token_id": text.bos_token_id,
                "has_own_template": text.has_own_template,
                "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            _seal(folder, manifest)
            _move_into_place(folder, paths.models_dir / name)
    except EngineError as error:
        raise UnusableWeightsError(str(error), "Choose another file of this model, or another model.") from error
    except OSError as error:
        raise _disk_error(error, paths.models_dir) from error
    return get_installed(paths, name)


def sweep_leftovers(paths: Paths) -> int:
    """Delete what killed imports and removals left behind, and return how many there were. Folders that a live
    process works in are locked by it and stay."""
    if not paths.models_dir.is_dir():
        return 0
    num_swept = 0
    with _directory_lock(paths.models_dir):
        for folder in paths.models_dir.iterdir():
            if folder.name.startswith(REMOVING_PREFIX) or (
                folder.name.startswith(INSTALLING_PREFIX) and not _is_locked(folder)
            ):
                shutil.rmtree(folder, ignore_errors=True)
                num_swept += 1
    return num_swept


@contextmanager
def _installing_folder(paths: Paths, name: str) -> Iterator[Path]:
    """A folder of our own under a hidden name, locked while we live and gone if anything fails."""
    make_private_dir(paths.models_dir)
    folder = paths.models_dir / f"{INSTALLING_PREFIX}{name}-{secrets.token_hex(4)}"
    with _directory_lock(paths.models_dir):  # no sweep between making the folder and locking it
        folder.mkdir(mode=0o700)
        lock = _lock(folder, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _write_text(weights: Path, folder: Path, provenance: Provenance, config: dict[str, Any]) -> NativeText:
    try:
        text = write_native_text(weights, folder, provenance.sampling)
    except UserError as error:
        raise UnusableWeightsError(error.message, error.hint) from error
    num_rows = int(config["vocab_size"])
    if text.num_tokens > num_rows:
        raise UnusableWeightsError(
            f"{weights} is damaged: its tokenizer has {text.num_tokens} tokens, its model {num_rows}."
        )
    return text


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Flush every file, then write the manifest that names them, last."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    facts = {file.name: _facts(file) for file in files}
    size_bytes = sum(fact["size"] for fact in facts.values())
    manifest_file = folder / MANIFEST
    manifest_file.write_text(json.dumps({**manifest, "size_bytes": size_bytes, "files": facts}, indent=1), "utf-8")
    _flush(manifest_file)
    _flush(folder)


def _facts(file: Path) -> dict[str, Any]:
    _flush(file)
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(file)}


def sha256_of(file: Path, on_bytes: OnBytes | None = None, is_cancelled: IsCancelled = lambda: False) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if is_cancelled():
                raise PullCancelled
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done, total)
    return digest.hexdigest()


def _move_into_place(folder: Path, target: Path) -> None:
    if target.exists():  # a damaged one: a usable one would have ended the pull at its start
        shutil.rmtree(set_aside(target), ignore_errors=True)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"The model '{target.name}' was installed by someone else just now.") from error
        raise
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _directory_lock(folder: Path) -> Iterator[None]:
    lock = _lock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, how: int) -> int:
    """An open descriptor that holds the lock; the kernel lets go of it when the process dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(folder: Path) -> int | None:
    """The lock of `folder` as an open descriptor, or None when a live process holds it."""
    try:
        return _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _is_locked(folder: Path) -> bool:
    lock = try_lock(folder)
    if lock is None:
        return True
    os.close(lock)
    return False


def _disk_error(error: OSError, folder: Path) -> UserError:
    place = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"The disk of {folder} is full; nothing was installed.", "Free some space and try again.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"No permission to write {place}.", "Mend the permissions, or set CHATKV_HOME.")
    return UserError(f"Cannot install the model: {error.strerror or error} ({place}).")


def installed_or_none(paths: Paths, name: str) -> InstalledModel | None:
    """The usable model called `name`; None when there is none or a damaged one, which an install replaces."""
    model = find_installed(paths, name)
    return model if model is not None and model.is_usable else None
