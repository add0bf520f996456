"""The native directory: config.json and one model.safetensors with packed tensors, written once, then only mapped.

The content hash covers names, types, shapes and bytes of all tensors, and lies in the file's own metadata. It is
trusted while size and mtime are those that `chatkv.json` recorded at import; otherwise it is computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from chatkv.kernels import backend_for
from safetensors import safe_open
from torch import Tensor

from ..errors import BrokenModelError, UnsupportedModelError
from ..quant.formats import PackedTensor, format_of, parts_of, shape_of, tensor_from_parts, tensor_names
from .config import ModelConfig
from .decoder import Decoder, WeightFacts
from .names import tensor_shapes
from .source import WeightSource, read_config

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "chatkv.json"
FORMAT = "chatkv-weights-1"

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
}
_HEADER_BYTES_PER_PART = 256


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What an import wrote."""

    content_sha256: str
    num_bytes: int
    weight_format: str
    num_params: int


def write_weights(
    source: WeightSource, dest_dir: Path, on_progress: Callable[[int, int], None] | None = None
) -> WeightsInfo:
    """Write model.safetensors and config.json into the existing folder `dest_dir`, synced to disk.

    `on_progress(done_bytes, total_bytes)` is called after each tensor and may raise to stop. On any error the folder
    holds a partial file: the caller gives a folder of its own and renames it when all is done.
    """
    shapes = tensor_shapes(source.model_config)
    header: dict[str, Any] = {}
    formats: Counter[str] = Counter()
    digest = hashlib.sha256()
    done_bytes = 0
    header_bytes = 4096 + 3 * _HEADER_BYTES_PER_PART * len(shapes)
    with (dest_dir / WEIGHTS_FILE).open("wb") as file:
        file.seek(8 + header_bytes)
        for name, tensor in source.tensors():
            if shape_of(tensor) != shapes[name]:
                raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shapes[name]}.")
            formats[format_of(tensor)] += math.prod(shapes[name])
            for part_name, part in parts_of(name, tensor).items():
                data = _bytes(part)
                if done_bytes % part.element_size():
                    raise UnsupportedModelError(f"Tensor {name} cannot be aligned: a tensor before it has an odd size.")
                header[part_name] = {
                    "dtype": _DTYPE_NAMES[part.dtype],
                    "shape": list(part.shape),
                    "data_offsets": [done_bytes, done_bytes + len(data)],
                }
                _digest_part(digest, part_name, part, data)
                file.write(data)
                done_bytes += len(data)
            if on_progress:
                on_progress(done_bytes, source.total_bytes)
        content_sha256 = digest.hexdigest()
        weight_format = formats.most_common(1)[0][0]
        header["__metadata__"] = {"format": FORMAT, "content_sha256": content_sha256, "weight_format": weight_format}
        _write_header(file, header, header_bytes)
    (dest_dir / CONFIG_FILE).write_text(json.dumps(source.hf_config, indent=2) + "\n", encoding="utf-8")
    return WeightsInfo(content_sha256, done_bytes, weight_format, formats.total())


def load_model(native_dir: Path, device: str = "cpu", on_progress: Callable[[float], None] | None = None) -> Decoder:
    """Map an imported model and lay its weights out for `device`. `on_progress` gets 0 .. 1.

    Raises BrokenModelError when the directory is damaged or was changed after import.
    """
    config = ModelConfig.from_hf(read_config(native_dir))
    file = native_dir / WEIGHTS_FILE
    with _opened(file) as reader:
        metadata = reader.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise BrokenModelError(f"{file} was not written by this version of chatkv. Pull the model again.")
        if not _is_unchanged(native_dir) and content_hash(file) != metadata["content_sha256"]:
            raise BrokenModelError(f"{file} has changed since it was imported: it is damaged. Pull the model again.")
        names = set(reader.keys())
        shapes = tensor_shapes(config)
        if tensor_names(names) != shapes.keys():
            raise BrokenModelError(f"{file} and config.json do not fit together. Pull the model again.")

        def read(name: str) -> PackedTensor:
            parts = {part: reader.get_tensor(part) for part in names if part == name or part.startswith(f"{name}.")}
            tensor = tensor_from_parts(name, parts)
            if shape_of(tensor) != shapes[name]:
                raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shapes[name]}.")
            return tensor

        facts = WeightFacts(metadata["content_sha256"], metadata["weight_format"])
        return Decoder(config, read, facts, backend_for(device), on_progress)


def content_hash(weights_file: Path) -> str:
    """The hash made at import, computed again from the tensors in the file."""
    digest = hashlib.sha256()
    with weights_file.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    with _opened(weights_file) as reader:
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            part = reader.get_tensor(name)
            _digest_part(digest, name, part, _bytes(part))
    return digest.hexdigest()


def _digest_part(digest: hashlib._Hash, name: str, part: Tensor, data: memoryview) -> None:
    frame = json.dumps([name, _DTYPE_NAMES[part.dtype], list(part.shape)])
    digest.update(len(frame).to_bytes(4, "little") + frame.encode())
    digest.update(data)


def _bytes(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).view(torch.uint8).numpy().data


def _write_header(file: BinaryIO, header: dict[str, Any], header_bytes: int) -> None:
    """safetensors: length as u64le, JSON (spaces may follow it), data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > header_bytes:
        raise UnsupportedModelError("The model has tensor names that are too long to store.")
    file.seek(0)
    file.write(header_bytes.to_bytes(8, "little") + text.ljust(header_bytes))
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (safetensors.SafetensorError, OSError) as error:
        raise BrokenModelError(f"{file} is damaged or missing: {error}. Pull the model again.") from None


def _is_unchanged(native_dir: Path) -> bool:
    """Whether size and mtime of the weights are those of the import."""
    try:
        manifest = json.loads((native_dir / MANIFEST_FILE).read_text(encoding="utf-8"))
        recorded = manifest["files"][WEIGHTS_FILE]
        status = (native_dir / WEIGHTS_FILE).stat()
        return (recorded["size"], recorded["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return False
