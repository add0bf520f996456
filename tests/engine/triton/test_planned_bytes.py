"""The planner's bytes of weights are those that lie on the device."""

from __future__ import annotations

import pytest
import torch
from device_models import INTERPRETER, LLAMA, tensors

from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder, WeightFacts
from chatkv.engine.models.quantised import converted
from chatkv.engine.quant.formats import PackedTensor
from chatkv.engine.quant.spec import QuantSpec
from chatkv.engine.weight_options import BF16, FP8, INT4, INT8, WeightOption, option_in, stored_option
from chatkv.kernels.tile_layout import tile
from tests.engine.tiny import packed, quantised

CONFIG = ModelConfig.from_hf(LLAMA | {"tie_word_embeddings": True})
VECTOR_BYTES = (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size * 4


def device_bytes(weights: dict[str, PackedTensor]) -> int:
    return Decoder(CONFIG, weights.__getitem__, WeightFacts("0" * 64, ""), INTERPRETER).weight_bytes


def named() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}


def check(option: WeightOption, weights: dict[str, PackedTensor]) -> None:
    """Devices may pad scales by a little."""
    assert option.num_bytes - VECTOR_BYTES == pytest.approx(device_bytes(weights), rel=0.01)


@pytest.mark.parametrize("spec", [BF16, FP8, INT8, *INT4], ids=lambda spec: spec.name)
def test_made_weights(spec: QuantSpec) -> None:
    check(option_in(CONFIG, spec), {name: converted(name, packed(tensor), spec) for name, tensor in named().items()})


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int4-affine"])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_weights_that_are_kept_as_they_are(weight_format: str, is_tiled: bool) -> None:
    weights: dict[str, PackedTensor] = {}
    for name, tensor in named().items():
        matrix = quantised(tensor, weight_format) if tensor.dim() == 2 else None
        weights[name] = tensor if matrix is None else tile(matrix) if is_tiled else matrix
    check(stored_option(weight_format, weights.values()), weights)
