"""How a packed tensor is named and split in a safetensors file, and put together again.

A matrix `x.weight` in float formats is one tensor of that name. int8 is `x.weight.q8` and `x.weight.scales`; int4 is
`x.weight.q4`, `x.weight.scales` and, where it has minimums, `x.weight.minimums` (layouts: `kernels.weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from chatkv.kernels.weights import FpWeight, Int4Weight, Int8Weight, Weight

from ..errors import BrokenModelError

PackedTensor: TypeAlias = Weight | Tensor
"""A matrix in some format, or a plain vector (norm weights, biases)."""

FP_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
PART_SUFFIXES = (".q8", ".q4", ".scales", ".minimums")


def format_of(tensor: PackedTensor) -> str:
    match tensor:
        case Int8Weight():
            return "int8-g32"
        case Int4Weight(minimums=None):
            return "int4-g32"
        case Int4Weight():
            return "int4-affine-g32"
        case FpWeight(values):
            return FP_FORMATS[values.dtype]
    return FP_FORMATS[tensor.dtype]


def shape_of(tensor: PackedTensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def parts_of(name: str, tensor: PackedTensor) -> dict[str, Tensor]:
    """The plain tensors that a file holds for it."""
    match tensor:
        case FpWeight(values):
            return {name: values}
        case Int8Weight(quanta, scales):
            return {f"{name}.q8": quanta, f"{name}.scales": scales}
        case Int4Weight(quanta, scales, minimums):
            parts = {f"{name}.q4": quanta, f"{name}.scales": scales}
            return parts if minimums is None else parts | {f"{name}.minimums": minimums}
    return {name: tensor}


def tensor_names(part_names: Iterable[str]) -> set[str]:
    """The tensors that these parts belong to."""
    return {next((n.removesuffix(s) for s in PART_SUFFIXES if n.endswith(s)), n) for n in part_names}


def tensor_from_parts(name: str, parts: Mapping[str, Tensor]) -> PackedTensor:
    """Inverse of `parts_of`. Raises BrokenModelError when a part is missing or has an impossible shape."""
    try:
        if name in parts:
            plain = parts[name]
            return FpWeight(plain) if plain.dim() == 2 else plain
        scales = parts[f"{name}.scales"]
        if f"{name}.q8" in parts:
            return _checked(name, Int8Weight(parts[f"{name}.q8"], scales), 32, torch.int8)
        weight = Int4Weight(parts[f"{name}.q4"], scales, parts.get(f"{name}.minimums"))
        return _checked(name, weight, 16, torch.uint8)
    except KeyError as error:
        raise BrokenModelError(f"Tensor part {error} is missing: the model is incomplete. Pull it again.") from None


def _checked(
    name: str, weight: Int8Weight | Int4Weight, group_bytes: int, dtype: torch.dtype
) -> Int8Weight | Int4Weight:
    minimums = weight.minimums if isinstance(weight, Int4Weight) else None
    fits = (
        weight.scales.dim() == 2
        and tuple(weight.quanta.shape) == (*weight.scales.shape, group_bytes)
        and weight.quanta.dtype == dtype
        and weight.scales.dtype == torch.float16
        and (minimums is None or (minimums.shape == weight.scales.shape and minimums.dtype == torch.float16))
    )
    if not fits:
        raise BrokenModelError(f"The parts of tensor {name} do not fit together: the model is damaged. Pull it again.")
    return weight


def is_finite(tensor: PackedTensor) -> bool:
    """No infinity or NaN among the numbers (packed: among scales and minimums)."""
    return all(bool(part.isfinite().all()) for part in parts_of("", tensor).values() if part.is_floating_point())
