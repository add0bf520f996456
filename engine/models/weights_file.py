"""The native weights file: plain safetensors, with the content hash in its metadata.

Every part starts at a multiple of 64 bytes; small tensors named `padding.N` fill the gaps, which the format does not
allow to be empty. The content hash covers names, types, shapes and bytes of all other tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import BrokenModelError, UnsupportedModelError

FORMAT = "chatkv-weights-1"

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
}
PADDING = "padding."
ALIGNMENT = 64
_HEADER_BYTES_PER_PART = 320


class WeightsWriter:
    """Streams a safetensors file: length of the header as u64le, header as JSON (spaces may follow it), data.

    The header's place is left free and filled at the end, so that each tensor is read and written once.
    """

    def __init__(self, file: BinaryIO, max_parts: int):
        self._file = file
        self._header: dict[str, Any] = {}
        self._digest = hashlib.sha256()
        self._position = 0
        self._header_bytes = -(-_HEADER_BYTES_PER_PART * (max_parts + 4) // ALIGNMENT) * ALIGNMENT - 8
        file.seek(8 + self._header_bytes)

    def write(self, name: str, part: Tensor) -> int:
        """Append one tensor; returns its size in bytes."""
        gap = -self._position % ALIGNMENT
        if gap:
            self._append(f"{PADDING}{len(self._header)}", "U8", [gap], bytes(gap))
        data = _bytes(part)
        self._append(name, _DTYPE_NAMES[part.dtype], list(part.shape), data)
        _digest_part(self._digest, name, part, data)
        return len(data)

    def finish(self, weight_format: str) -> str:
        """Write the header, sync, and return the content hash."""
        content_sha256 = self._digest.hexdigest()
        metadata = {"format": FORMAT, "content_sha256": content_sha256, "weight_format": weight_format}
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


def content_hash(weights_file: Path) -> str:
    """The hash made at import, computed again from the tensors in the file."""
    digest = hashlib.sha256()
    with weights_file.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = [name for name in header if name != "__metadata__" and not name.startswith(PADDING)]
    with opened_weights(weights_file) as reader:
        for name in sorted(names, key=lambda name: header[name]["data_offsets"]):
            part = reader.get_tensor(name)
            _digest_part(digest, name, part, _bytes(part))
    return digest.hexdigest()


@contextmanager
def opened_weights(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (safetensors.SafetensorError, OSError) as error:
        raise BrokenModelError(f"{file} is damaged or missing: {error}. Pull the model again.") from None


def _digest_part(digest: hashlib._Hash, name: str, part: Tensor, data: memoryview) -> None:
    frame = json.dumps([name, _DTYPE_NAMES[part.dtype], list(part.shape)])
    digest.update(len(frame).to_bytes(4, "little") + frame.encode())
    digest.update(data)


def _bytes(part: Tensor) -> memoryview:
    return part.contiguous().view(-1).view(torch.uint8).numpy().data
