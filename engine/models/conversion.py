"""Rewrites weights that an earlier chatkv imported: once, when they are loaded for the first time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import BrokenModelError, ModelStorageError
from .manifest import WEIGHTS_FILE, replace_weights
from .weights_file import FORMAT_1, MappedWeights, WeightsWriter, map_weights

TEMPORARY_FILE = f"{WEIGHTS_FILE}.new"


def convert_weights(
    native_dir: Path, shapes: Mapping[str, tuple[int, ...]], on_progress: Callable[[float], None]
) -> None:
    """Turn a weights file of version 1 into the present version, with the same content hash.

    Killed at any point it leaves a model that loads, and at most a temporary file that the next conversion overwrites.
    `on_progress` gets 0 .. 1 and may raise to stop. Raises BrokenModelError when the weights are not those that were
    imported, ModelStorageError when there is no room or no permission; the old file is in its place then.
    """
    temporary = native_dir / TEMPORARY_FILE
    try:
        with locked(native_dir):
            old = map_weights(native_dir / WEIGHTS_FILE)
            if old.format != FORMAT_1:
                return  # Another process was faster.
            try:
                if _write(old, temporary, shapes, on_progress) != old.content_sha256:
                    raise changed_since_import(native_dir)
                replace_weights(native_dir, temporary)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _storage_error(error, native_dir) from None


def changed_since_import(native_dir: Path) -> BrokenModelError:
    file = native_dir / WEIGHTS_FILE
    return BrokenModelError(f"{file} has changed since it was imported: it is damaged. Pull the model again.")


def _write(
    old: MappedWeights, file: Path, shapes: Mapping[str, tuple[int, ...]], on_progress: Callable[[float], None]
) -> str:
    names = old.tensor_names  # The content hash depends on their order.
    with file.open("wb") as opened:
        writer = WeightsWriter(opened, len(names))
        for index, name in enumerate(names):
            writer.write(name, old.read(name, shapes[name]))
            on_progress((index + 1) / len(names))
        return writer.finish(old.weight_format)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when it dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _storage_error(error: OSError, native_dir: Path) -> ModelStorageError:
    what = f"The weights in {native_dir} must be rewritten once for this version of chatkv, but"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        num_megabytes = -(-(native_dir / WEIGHTS_FILE).stat().st_size // 1_000_000)
        return ModelStorageError(
            f"{what} the disk is full: about {num_megabytes} MB must be free for a moment. Nothing was lost. "
            "Free some space and load the model again."
        )
    return ModelStorageError(
        f"{what} that failed: {error.strerror or error}. Nothing was lost. Check who may write there, and load the "
        "model again."
    )
