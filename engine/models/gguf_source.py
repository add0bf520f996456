"""Weights of a GGUF file, packed tensors kept exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor
from torch import Tensor

from chatkv.kernels.weights import select_rows

from ..errors import BrokenModelError, UnsupportedModelError
from ..quant.formats import PackedTensor, is_finite, shape_of
from ..quant.gguf_blocks import SUPPORTED_TYPES, tensor_from_gguf
from .config import ModelConfig
from .gguf_config import PERMUTED, ROPE_FACTORS, gguf_name, hf_config
from .names import tensor_shapes


class GgufSource:
    """Implements `WeightSource`."""

    def __init__(self, file: Path):
        reader = _read(file)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # Array fields (the vocabulary) are the tokenizer's; reading them takes seconds.
        metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        self._arch = str(metadata.get("general.architecture"))
        shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self.hf_config: dict[str, Any] = hf_config(metadata, shapes, self._rope_factors())
        self.model_config = ModelConfig.from_hf(self.hf_config)
        self._shapes = tensor_shapes(self.model_config)
        self._check(shapes)

    @property
    def total_bytes(self) -> int:
        return sum(int(self._tensors[gguf_name(name)].n_bytes) for name in self._shapes)

    def tensors(self) -> Iterator[tuple[str, PackedTensor]]:
        for name in self._shapes:
            raw = self._tensors[gguf_name(name)]
            tensor = tensor_from_gguf(raw.name, raw.tensor_type.name, raw.data)
            if not is_finite(tensor):
                raise BrokenModelError(f"Tensor {raw.name} holds infinite or undefined numbers: the file is damaged.")
            yield name, self._unpermuted(name, tensor)

    def _rope_factors(self) -> tuple[float, ...] | None:
        tensor = self._tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.tensor_type.name != "F32":
            raise _unsupported_type(tensor)
        return tuple(float(x) for x in tensor.data)

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        expected = {gguf_name(name): shape for name, shape in self._shapes.items()}
        for name, tensor in self._tensors.items():
            if name != ROPE_FACTORS and name not in expected:
                raise UnsupportedModelError(
                    f"Tensor {name} is not part of {self.model_config.architecture} as chatkv knows it."
                )
            if tensor.tensor_type.name not in SUPPORTED_TYPES:
                raise _unsupported_type(tensor)
        for name, shape in expected.items():
            if name not in shapes:
                raise BrokenModelError(f"The GGUF file lacks tensor {name}: it is damaged or incomplete.")
            if shapes[name] != shape:
                raise BrokenModelError(
                    f"Tensor {name} has shape {shapes[name]}, but the file's metadata ask for {shape}."
                )

    def _unpermuted(self, name: str, tensor: PackedTensor) -> PackedTensor:
        heads = {"q_proj": self.model_config.num_heads, "k_proj": self.model_config.num_kv_heads}
        projection = next((p for p in heads if f".{p}." in name), None)
        if self._arch not in PERMUTED or projection is None:
            return tensor
        rows = halves_from_pairs(heads[projection], shape_of(tensor)[0])
        return tensor.index_select(0, rows) if isinstance(tensor, Tensor) else select_rows(tensor, rows)


def halves_from_pairs(num_heads: int, num_rows: int) -> Tensor:
    """Row indices that turn GGUF's order within a head (pairs side by side) into Hugging Face's (two halves)."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _read(file: Path) -> GGUFReader:
    try:
        return GGUFReader(file)
    except OSError as error:
        raise BrokenModelError(f"{file.name} cannot be read: {error}.") from None
    # The reader checks little: a damaged file surfaces as whatever its parsing trips over.
    except Exception as error:
        raise BrokenModelError(
            f"{file.name} is damaged, incomplete or not a GGUF file ({type(error).__name__}: {error}). Pull it again."
        ) from None


def _unsupported_type(tensor: ReaderTensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Tensor {tensor.name} has type {tensor.tensor_type.name}; chatkv reads {', '.join(SUPPORTED_TYPES)}. "
        "Choose a file with one of these."
    )
