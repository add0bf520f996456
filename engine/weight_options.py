"""The formats that a model's weights may take on a card, best first, and the bytes that each takes there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from chatkv.kernels.weights import TILE_ROWS, FpWeight, TiledWeight

from .models.config import ModelConfig
from .models.names import EMBEDDING, HEAD, tensor_shapes
from .quant.formats import FP_FORMATS, PackedTensor, parts_of
from .quant.spec import QuantSpec, WeightFormat

FP8_MULTIPLIES_FROM = (8, 9)
"""Compute capability with matrix instructions for fp8; below, its bytes are decoded to 16 bits first."""
VECTOR_BYTES = 4
"""Norms and biases stay float32."""
FLOAT_BYTES = 2
"""A matrix of floats, whatever it was stored in."""
UNPACKED_BYTES = 2 * 6
"""Of a weight of bitsandbytes, whose matrices are unpacked one by one when they are multiplied, by way of float32; once
for steps that are captured and once for others."""

BF16 = QuantSpec("bf16")
FP8 = QuantSpec("fp8", is_searched=True)
INT8 = QuantSpec("int8", 32)
INT4 = tuple(QuantSpec("int4-affine", group_size, is_searched=True) for group_size in (32, 64, 128))
SPECS_BY_FORMAT: Mapping[str, Sequence[QuantSpec]] = {
    "bf16": (BF16,),
    "fp8": (FP8,),
    "int8": (INT8,),
    "int4": INT4,
    "nf4": (QuantSpec("nf4"),),
    "int8-bnb": (QuantSpec("int8-bnb"),),
}


@dataclass(frozen=True, slots=True)
class WeightOption:
    """One format that the weights can be brought to."""

    weight_format: str
    spec: QuantSpec | None
    """What is made of matrices of floats; None: nothing, they become 16 bits wide on their way to the card."""
    num_bytes: int
    """Of all tensors as they lie on the device."""
    bits_per_weight: float
    scratch_bytes: int = 0
    """Device memory that multiplying takes beside the result."""


def float_options(
    config: ModelConfig, capability: tuple[int, int], weight_format: WeightFormat = "auto"
) -> list[WeightOption]:
    """What weights of 16 or 32 bits may become on a card of this compute capability, best first.

    An option that takes no less than a better one is left out: it does not fit where that does not.
    """
    options: list[WeightOption] = []
    for spec in _specs(capability, weight_format):
        option = option_in(config, spec)
        if not options or option.num_bytes < options[-1].num_bytes:
            options.append(option)
    return options


def option_in(config: ModelConfig, spec: QuantSpec) -> WeightOption:
    num_bytes = num_matrix_bytes = num_weights = largest = 0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            num_bytes += shape[0] * VECTOR_BYTES
        else:
            num_matrix_bytes += _packed_bytes(name, shape[0], shape[1], spec)
            num_weights += math.prod(shape)
            largest = max(largest, math.prod(shape) if name not in (EMBEDDING, HEAD) else 0)
    made = None if spec.kind == "bf16" else spec
    scratch_bytes = largest * UNPACKED_BYTES if spec.kind in ("nf4", "int8-bnb") else 0
    bits_per_weight = 8 * num_matrix_bytes / num_weights
    return WeightOption(spec.name, made, num_bytes + num_matrix_bytes, bits_per_weight, scratch_bytes)


def stored_option(weight_format: str, tensors: Iterable[PackedTensor]) -> WeightOption:
    """Weights that stay as they are. weight_format: what most of them lie in."""
    num_bytes = num_matrix_bytes = num_weights = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            num_bytes += tensor.numel() * VECTOR_BYTES
        else:
            num_matrix_bytes += _stored_bytes(tensor)
            num_weights += math.prod(tensor.shape)
    name = "bf16" if weight_format == "fp32" else weight_format
    return WeightOption(name, None, num_bytes + num_matrix_bytes, 8 * num_matrix_bytes / max(1, num_weights))


def is_packed(weight_format: str) -> bool:
    """Whether weights that mostly lie in this format are quantised: then they are kept exactly."""
    return weight_format not in FP_FORMATS.values()


def _specs(capability: tuple[int, int], weight_format: WeightFormat) -> Sequence[QuantSpec]:
    """Best first."""
    if weight_format not in ("auto", "as-is"):
        return SPECS_BY_FORMAT[weight_format]
    if weight_format == "as-is":
        return (BF16,)
    # 8 bits with a scale for each 32 weights are finer than the 4 that a number of fp8 has. But where fp8 multiplies in
    # hardware it is quicker.
    eight_bits = (FP8, INT8) if capability >= FP8_MULTIPLIES_FROM else (INT8, FP8)
    return BF16, *eight_bits, *INT4


def _packed_bytes(name: str, num_rows: int, num_columns: int, spec: QuantSpec) -> int:
    chosen = spec.for_tables if name in (EMBEDDING, HEAD) else spec
    num_bytes = None if chosen is None else chosen.packed_bytes(num_rows, num_columns)
    return num_rows * num_columns * FLOAT_BYTES if num_bytes is None else num_bytes


def _stored_bytes(tensor: PackedTensor) -> int:
    match tensor:
        case FpWeight(values):
            return values.numel() * FLOAT_BYTES
        case TiledWeight(_, tiles, num_rows):
            # Without the rows that fill the last tile up.
            return -(-tiles.nbytes * num_rows // (tiles.shape[0] * TILE_ROWS))
    return sum(part.nbytes for part in parts_of("", tensor).values())
