"""What a native directory holds, seen without loading it: pages are read only where a tensor is looked into."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from ..quant.formats import PackedTensor
from .config import ModelConfig
from .manifest import WEIGHTS_FILE
from .names import tensor_shapes
from .source import read_config
from .weights_file import map_weights


class StoredWeights(NamedTuple):
    config: ModelConfig
    weight_format: str
    """Of most of its weights."""
    compute_dtype: Literal["bf16", "fp16"]
    """What they were trained in, as far as the config says so: float16 has not the range that others need."""
    tensors: list[PackedTensor]


def look_at_weights(native_dir: Path) -> StoredWeights:
    """Raises BrokenModelError when the directory is damaged, UnsupportedModelError for models that cannot be run."""
    hf_config = read_config(native_dir)
    config = ModelConfig.from_hf(hf_config)
    shapes = tensor_shapes(config)
    weights = map_weights(native_dir / WEIGHTS_FILE)
    tensors = [weights.read(name, shapes[name]) for name in weights.tensor_names if name in shapes]
    dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
    return StoredWeights(config, weights.weight_format, "fp16" if dtype == "float16" else "bf16", tensors)
