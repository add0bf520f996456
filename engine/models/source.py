"""Where weights come from: one interface over Hugging Face directories and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ..errors import BrokenModelError, UnsupportedModelError
from ..quant.formats import PackedTensor
from .config import ModelConfig


class WeightSource(Protocol):
    """Weights on disk, checked for completeness when opened. Nothing is read before `tensors()` is iterated."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """In the form of a Hugging Face config.json."""
        ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def total_bytes(self) -> int:
        """Of all tensors, as packed."""
        ...

    def tensors(self) -> Iterator[tuple[str, PackedTensor]]:
        """Hugging Face names and packed tensors, in the order of `names.tensor_shapes`.

        Raises BrokenModelError for numbers that cannot be right.
        """
        ...


def open_source(path: Path) -> WeightSource:
    """Open a .gguf file, or a directory with config.json and *.safetensors.

    Raises UnsupportedModelError naming an architecture, tensor or type that chatkv does not run, and BrokenModelError
    naming what is damaged or missing; nothing has been written then.
    """
    from .gguf_source import GgufSource
    from .safetensors_source import SafetensorsSource

    if path.is_dir():
        return SafetensorsSource(path)
    if not path.exists():
        raise BrokenModelError(f"{path} does not exist. Give a .gguf file or a Hugging Face model directory.")
    if path.suffix.lower() == ".gguf":
        return GgufSource(path)
    raise UnsupportedModelError(
        f"{path.name} is not a format that chatkv reads. Give a .gguf file, or a directory with config.json and "
        "*.safetensors."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a directory. Raises BrokenModelError when it is missing or not a JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModelError(f"{folder} has no config.json: it is not a model directory.") from None
    except (ValueError, OSError) as error:
        raise BrokenModelError(f"{file} cannot be read: {error}. Pull the model again.") from None
    if not isinstance(config, dict):
        raise BrokenModelError(f"{file} must hold a JSON object.")
    return config
