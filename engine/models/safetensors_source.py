"""Weights of a Hugging Face directory: config.json and one or more safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
from safetensors import safe_open

from chatkv.kernels.weights import FpWeight

from ..errors import BrokenModelError, UnsupportedModelError
from ..quant.formats import PackedTensor, is_finite
from .config import ModelConfig
from .names import HEAD, tensor_shapes
from .source import read_config

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """Implements `WeightSource`."""

    def __init__(self, folder: Path):
        self.hf_config: dict[str, Any] = read_config(folder)
        self.model_config = ModelConfig.from_hf(self.hf_config)
        self._shapes = tensor_shapes(self.model_config)
        self._files = {name: file for file in weight_files(folder) for name in self._check_file(file)}
        missing = sorted(self._shapes.keys() - self._files.keys())
        if missing:
            raise BrokenModelError(
                f"{folder.name} lacks {len(missing)} tensors, {missing[0]} first: the download is incomplete."
            )

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def tensors(self) -> Iterator[tuple[str, PackedTensor]]:
        with ExitStack() as stack:
            readers = {f: stack.enter_context(safe_open(f, framework="pt")) for f in set(self._files.values())}
            for name, shape in self._shapes.items():
                values = readers[self._files[name]].get_tensor(name)
                tensor = FpWeight(values) if len(shape) == 2 else values
                if not is_finite(tensor):
                    raise BrokenModelError(f"Tensor {name} holds infinite or undefined numbers: the file is damaged.")
                yield name, tensor

    _total_bytes = 0

    def _check_file(self, file: Path) -> list[str]:
        """The file's tensors that the model uses."""
        used = []
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    if self._is_ignored(name):
                        continue
                    view = reader.get_slice(name)
                    self._check_tensor(name, tuple(view.get_shape()), view.get_dtype())
                    used.append(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise BrokenModelError(f"{file.name} is damaged or incomplete: {error}. Pull it again.") from None
        return used

    def _is_ignored(self, name: str) -> bool:
        """Old checkpoints store RoPE frequencies; some store a tied head a second time."""
        return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and self.model_config.is_head_tied)

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if name not in self._shapes:
            raise UnsupportedModelError(
                f"Tensor {name} is not part of {self.model_config.architecture} as chatkv knows it."
            )
        if dtype not in ITEM_BYTES:
            raise UnsupportedModelError(f"Tensor {name} has type {dtype}; chatkv reads {', '.join(ITEM_BYTES)}.")
        if shape != self._shapes[name]:
            raise BrokenModelError(f"Tensor {name} has shape {shape}, but config.json asks for {self._shapes[name]}.")
        self._total_bytes += math.prod(shape) * ITEM_BYTES[dtype]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory, by its index where there is one."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, OSError) as error:
            raise BrokenModelError(f"{index.name} cannot be read: {error!r}. Pull the model again.") from None
        # A shard is a plain name beside the index, never a path elsewhere.
        if any(Path(name).name != name for name in names):
            raise BrokenModelError(f"{index.name} names a file outside the model's directory.")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise BrokenModelError(f"{folder.name} lacks {', '.join(missing) or '*.safetensors'}. Pull the model again.")
    return files
