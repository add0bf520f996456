"""An imported model's numbers as the floats they stand for, as if it had never been quantised: shared by the tests and
the benchmark of weight formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.names import tensor_shapes
from chatkv.engine.models.source import read_config
from chatkv.engine.models.weights_file import map_weights
from chatkv.engine.quant.formats import PackedTensor
from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import FpWeight


class FloatSource:
    """Implements `WeightSource`. `dtype`: float32, or bfloat16, to which numbers are rounded."""

    def __init__(self, native_dir: Path, dtype: torch.dtype):
        self.hf_config = read_config(native_dir)
        self.model_config = ModelConfig.from_hf(self.hf_config)
        self.shapes = tensor_shapes(self.model_config)
        self._weights = map_weights(native_dir / "model.safetensors")
        self._dtype = dtype

    @property
    def total_bytes(self) -> int:
        return self._dtype.itemsize * sum(map(math.prod, self.shapes.values()))

    def tensors(self) -> Iterator[tuple[str, PackedTensor]]:
        for name, shape in self.shapes.items():
            tensor = self._weights.read(name, shape)
            yield name, tensor if isinstance(tensor, Tensor) else FpWeight(dequantise(tensor).to(self._dtype))
