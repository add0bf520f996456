"""A model's weights in another format: made once, then kept beside those they were made from.

`quantised/<format>-<content hash>/` in the model's folder holds a weights file as an import writes it, and a manifest
with its size and mtime. The folder gets its name when all is written and synced, so there is never half of one; the
file names the weights and the quantiser that it was made with, so another's is never used.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from chatkv.kernels.bnb import NoBitsandbytesError
from chatkv.kernels.weights import FpWeight, num_bytes

from ..errors import BrokenModelError, ModelStorageError, UnsupportedModelError
from ..quant.formats import PackedTensor, format_of, is_finite
from ..quant.quantise import OnRows, quantise
from ..quant.spec import QuantSpec
from .conversion import locked
from .manifest import MANIFEST_FILE, WEIGHTS_FILE, has_unchanged_weights, record_weights, sync
from .names import EMBEDDING, HEAD
from .weights_file import FORMAT, MappedWeights, WeightsWriter, content_hash, map_weights

FOLDER = "quantised"
WRITING = ".writing-"
SPARE_BYTES = 64_000_000
"""Left free, so that chats and logs can still be written."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def spec_of_tensor(spec: QuantSpec, name: str) -> QuantSpec | None:
    """None: the tensor stays as it is."""
    return spec.for_tables if name in (EMBEDDING, HEAD) else spec


def converted(name: str, tensor: PackedTensor, spec: QuantSpec, on_rows: OnRows | None = None) -> PackedTensor:
    """A model's tensor in the format of `spec`. Vectors, and what is quantised already, are given back as they are."""
    own = spec_of_tensor(spec, name)
    return tensor if own is None or not isinstance(tensor, FpWeight) else quantise(tensor, own, on_rows)


def converted_bytes(source: MappedWeights, shapes: Shapes, spec: QuantSpec) -> int:
    """What the weights will take with `spec`."""
    return sum(_converted_bytes(name, source.read(name, shapes[name]), spec) for name in source.tensor_names)


def quantised_weights(
    native_dir: Path, source: MappedWeights, shapes: Shapes, spec: QuantSpec, on_progress: Callable[[float], None]
) -> MappedWeights:
    """`source`, the model's own weights, in the format of `spec`: those that were made before, or new ones.

    `on_progress` gets 0 .. 1 and may raise to stop; nothing stays then. Raises ModelStorageError when there is no room
    or no permission, UnsupportedModelError when a number does not fit the format or bitsandbytes is missing.
    """
    folder = native_dir / FOLDER / f"{spec.name}-{source.content_sha256[:16]}"
    origin = {"source_sha256": source.content_sha256, "quantiser": spec.identity}
    usable = _usable(folder, origin, shapes)
    if usable is not None:
        return usable
    try:
        with locked(native_dir):
            usable = _usable(folder, origin, shapes)
            if usable is None:  # Else another process was faster.
                _make(folder, source, shapes, spec, origin, on_progress)
    except NoBitsandbytesError as error:
        raise UnsupportedModelError(f"Weights in {spec.name} cannot be made: {error}.") from None
    except OSError as error:
        raise _storage_error(error, native_dir, spec) from None
    return usable or map_weights(folder / WEIGHTS_FILE)


def _usable(folder: Path, origin: Mapping[str, str], shapes: Shapes) -> MappedWeights | None:
    """The weights in `folder`, if they are whole, unchanged, and were made from what `origin` says."""
    try:
        weights = map_weights(folder / WEIGHTS_FILE)
        if weights.format != FORMAT or weights.facts != origin or weights.tensor_names != list(shapes):
            return None
        if not has_unchanged_weights(folder):
            if content_hash(weights, shapes) != weights.content_sha256:
                return None
            record_weights(folder)
    except (BrokenModelError, OSError):
        return None
    return weights


def _make(
    folder: Path,
    source: MappedWeights,
    shapes: Shapes,
    spec: QuantSpec,
    origin: Mapping[str, str],
    on_progress: Callable[[float], None],
) -> None:
    folder.parent.mkdir(exist_ok=True)
    _sweep(folder.parent, source.content_sha256)
    _require_room(folder.parent, converted_bytes(source, shapes, spec), spec)
    temporary = folder.with_name(WRITING + folder.name)
    try:
        temporary.mkdir()
        _write(temporary, source, shapes, spec, origin, on_progress)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    folder: Path,
    source: MappedWeights,
    shapes: Shapes,
    spec: QuantSpec,
    origin: Mapping[str, str],
    on_progress: Callable[[float], None],
) -> None:
    formats: Counter[str] = Counter()
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": {}}), "utf-8")
    with (folder / WEIGHTS_FILE).open("wb") as file:
        writer = WeightsWriter(file, len(shapes))
        for name, tensor in _converted_tensors(source, shapes, spec, on_progress):
            formats[format_of(tensor)] += math.prod(shapes[name])
            writer.write(name, tensor)
        writer.finish(formats.most_common(1)[0][0], origin)
    record_weights(folder)


def _converted_tensors(
    source: MappedWeights, shapes: Shapes, spec: QuantSpec, on_progress: Callable[[float], None]
) -> Iterator[tuple[str, PackedTensor]]:
    total, done = sum(map(math.prod, shapes.values())), 0
    for name, shape in shapes.items():
        row = math.prod(shape[1:])

        def report(num_rows: int, done: int = done, row: int = row) -> None:
            on_progress((done + num_rows * row) / total)

        tensor = converted(name, source.read(name, shape), spec, report)
        if not is_finite(tensor):
            raise UnsupportedModelError(
                f'Tensor {name} has numbers too large for {spec.name}. Set weight_format = "as-is".'
            )
        yield name, tensor
        done += math.prod(shape)
        on_progress(done / total)


def _sweep(folder: Path, content_sha256: str) -> None:
    """Remove what was left half written, and what was made from other weights."""
    for child in folder.iterdir():
        if child.name.startswith(WRITING) or not child.name.endswith(f"-{content_sha256[:16]}"):
            shutil.rmtree(child, ignore_errors=True)


def _converted_bytes(name: str, tensor: PackedTensor, spec: QuantSpec) -> int:
    own = spec_of_tensor(spec, name)
    if isinstance(tensor, FpWeight) and own is not None:
        return own.packed_bytes(*tensor.shape) or num_bytes(tensor)
    return tensor.nbytes if isinstance(tensor, Tensor) else num_bytes(tensor)


def _require_room(folder: Path, needed_bytes: int, spec: QuantSpec) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_BYTES > free_bytes:
        raise ModelStorageError(
            f"Weights in {spec.name} take {_megabytes(needed_bytes)} in {folder}, where {_megabytes(free_bytes)} are "
            f'free and {_megabytes(SPARE_BYTES)} must stay. Free some space, or set weight_format = "as-is".'
        )


def _storage_error(error: OSError, native_dir: Path, spec: QuantSpec) -> ModelStorageError:
    what = f"Weights in {spec.name} could not be kept in {native_dir / FOLDER}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelStorageError(f'{what}: the disk is full. Free some space, or set weight_format = "as-is".')
    return ModelStorageError(
        f'{what}: {error.strerror or error}. Check who may write there, or set weight_format = "as-is".'
    )


def _megabytes(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / 1e6):,} MB"
