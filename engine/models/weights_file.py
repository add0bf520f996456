"""The native weights file: plain safetensors, with the content hash in its metadata.

Every part starts at a multiple of 64 bytes; small tensors named `padding.N` fill the gaps, which the format does not
allow to be empty. Packed matrices lie as tiles, so that kernels read them where they are mapped. The content hash
covers names, types, shapes and bytes of what the tensors hold (`formats.logical`), in the file's order: it does not
depend on how they lie, and files of version 1, which held no tiles, have the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from chatkv.kernels.tile_layout import has_zero_padding
from chatkv.kernels.weights import TiledWeight

from ..errors import BrokenModelError, UnsupportedModelError
from ..quant.formats import PackedTensor, logical, parts_of, stored, tensor_from_parts, tensor_name

FORMAT = "chatkv-weights-2"
FORMAT_1 = "chatkv-weights-1"

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_PADDING = "padding."
ALIGNMENT = 64
_HEADER_BYTES_PER_TENSOR = 640


class WeightsWriter:
    """Streams a safetensors file: length of the header as u64le, header as JSON (spaces may follow it), data.

    The header's place is left free and filled at the end, so that each tensor is read and written once.
    """

    def __init__(self, file: BinaryIO, max_tensors: int):
        self._file = file
        self._header: dict[str, Any] = {}
        self._digest = hashlib.sha256()
        self._position = 0
        self._header_bytes = -(-_HEADER_BYTES_PER_TENSOR * (max_tensors + 4) // ALIGNMENT) * ALIGNMENT - 8
        file.seek(8 + self._header_bytes)

    def write(self, name: str, tensor: PackedTensor) -> int:
        """Append one tensor; returns the size of what it holds, in bytes."""
        for part_name, part in parts_of(name, stored(tensor)).items():
            gap = -self._position % ALIGNMENT
            if gap:
                self._append(f"{_PADDING}{len(self._header)}", "U8", [gap], bytes(gap))
            self._append(part_name, _DTYPE_NAMES[part.dtype], list(part.shape), _bytes(part))
        return _digest_tensor(self._digest, name, tensor)

    def finish(self, weight_format: str, facts: Mapping[str, str] | None = None) -> str:
        """Write the header, sync, and return the content hash. `facts`: more that readers are told."""
        content_sha256 = self._digest.hexdigest()
        own = {"format": FORMAT, "content_sha256": content_sha256, "weight_format": weight_format}
        metadata = {**(facts or {}), **own}
        text = json.dumps({"__metadata__": metadata, **self._header}, separators=(",", ":")).encode()
        if len(text) > self._header_bytes:
            raise UnsupportedModelError("The model has tensor names that are too long to store.")
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + text.ljust(self._header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        return content_sha256

    def _append(self, name: str, dtype: str, shape: list[int], data: bytes | memoryview) -> None:
        end = self._position + len(data)
        self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [self._position, end]}
        self._file.write(data)
        self._position = end


class _Part(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Bytes after the header."""
    end: int


@dataclass(frozen=True)
class MappedWeights:
    """A weights file in memory as the kernel maps it: pages are read when they are touched, shared with every process
    that maps the file, and dropped when memory is short. Read-only: writing to a tensor would end the process.
    """

    format: str
    content_sha256: str
    """As its writer said."""
    weight_format: str
    facts: Mapping[str, str]
    """What else its writer said."""
    _data: Tensor
    """uint8, all bytes after the header. Tensors made of it keep the mapping alive."""
    _tensors: Mapping[str, Mapping[str, _Part]]
    """Tensor name -> its parts by their names, both in the file's order."""

    @property
    def tensor_names(self) -> list[str]:
        """In the file's order."""
        return list(self._tensors)

    def part_names(self, tensor_name: str) -> list[str]:
        return list(self._tensors[tensor_name])

    def read(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """One tensor, in place. Raises BrokenModelError when a part is missing or the shape is another."""
        parts = {part_name: self._values(part) for part_name, part in self._tensors[name].items()}
        return tensor_from_parts(name, parts, shape)

    def _values(self, part: _Part) -> Tensor:
        data = self._data[part.begin : part.end]
        if data.data_ptr() % ALIGNMENT:
            data = data.clone()  # The first files of version 1 were not aligned.
        return data.view(part.dtype).view(part.shape)


def map_weights(file: Path) -> MappedWeights:
    """Map a weights file of any version. Raises BrokenModelError when it is missing or damaged."""
    try:
        with file.open("rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        data_start = 8 + int.from_bytes(mapping[:8], "little")
        header = json.loads(mapping[8:data_start])
        metadata = header.pop("__metadata__")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            data = torch.frombuffer(mapping, dtype=torch.uint8)[data_start:]
        tensors: dict[str, dict[str, _Part]] = {}
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            if not name.startswith(_PADDING):
                tensors.setdefault(tensor_name(name), {})[name] = _part(name, header[name], len(data))
        file_format, content_sha256, weight_format = (
            metadata.pop(name) for name in ("format", "content_sha256", "weight_format")
        )
        return MappedWeights(file_format, content_sha256, weight_format, metadata, data, tensors)
    # A damaged header surfaces as whatever reading it trips over.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise BrokenModelError(f"{file} is damaged or missing: {error}. Pull the model again.") from None


def content_hash(weights: MappedWeights, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The hash made at import, computed again from the tensors in the file.

    Raises BrokenModelError when there is something in tiles where there is no row: no content, but no import either.
    """
    digest = hashlib.sha256()
    for name in weights.tensor_names:
        tensor = weights.read(name, shapes[name])
        if isinstance(tensor, TiledWeight) and not has_zero_padding(tensor):
            raise BrokenModelError(f"Tensor {name} has changed since it was imported: it is damaged. Pull it again.")
        _digest_tensor(digest, name, tensor)
    return digest.hexdigest()


def _part(name: str, entry: dict[str, Any], num_data_bytes: int) -> _Part:
    part = _Part(_DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
    num_bytes = math.prod(part.shape) * part.dtype.itemsize
    is_within = 0 <= part.begin <= part.end <= num_data_bytes and part.end - part.begin == num_bytes
    if not is_within or any(n < 0 for n in part.shape):
        raise ValueError(f"{name} does not lie within the file")
    return part


def _digest_tensor(digest: hashlib._Hash, name: str, tensor: PackedTensor) -> int:
    num_bytes = 0
    for part_name, part in parts_of(name, logical(tensor)).items():
        frame = json.dumps([part_name, _DTYPE_NAMES[part.dtype], list(part.shape)])
        digest.update(len(frame).to_bytes(4, "little") + frame.encode())
        digest.update(_bytes(part))
        num_bytes += part.nbytes
    return num_bytes


def _bytes(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).view(torch.uint8).numpy().data
