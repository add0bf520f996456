"""How a packed tensor is named and split in a safetensors file, and put together again.

A matrix `x.weight` in float formats is one tensor of that name. One packed in groups of 32 is stored as tiles:
`x.weight.t8` (int8), `x.weight.t4` (int4) or `x.weight.t4a` (int4 with minimums). What it holds, in files of version 1
and for content hashes, is int8 `x.weight.q8` and `x.weight.scales`, or int4 `x.weight.q4`, `x.weight.scales` and, where
it has minimums, `x.weight.minimums` (layouts: `kernels.weights`). Other group sizes and float32 scales are stored as
these plain parts, as are fp8 (`x.weight.f8`, `x.weight.scales`) and what bitsandbytes packs (`x.weight.nf4` or
`x.weight.bnb8`, and `x.weight.scales`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from chatkv.kernels.tile_layout import fits_tiles, tile, tiles_shape, untile
from chatkv.kernels.weights import (
    GROUP_SIZES,
    NF4_BLOCK,
    BnbInt8Weight,
    Fp8Weight,
    FpWeight,
    Int4Weight,
    Int8Weight,
    Nf4Weight,
    TiledWeight,
    Weight,
)

from ..errors import BrokenModelError

PackedTensor: TypeAlias = Weight | Tensor
"""A matrix in some format, or a plain vector (norm weights, biases)."""

FP_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TILE_SUFFIXES = {"int8": ".t8", "int4": ".t4", "int4-affine": ".t4a"}
PART_SUFFIXES = (".q8", ".q4", ".f8", ".nf4", ".bnb8", ".scales", ".minimums", *TILE_SUFFIXES.values())


def format_of(tensor: PackedTensor) -> str:
    """Such as "bf16", "fp8", "int8-g32" or "int4-affine-g128"."""
    match tensor:
        case Int8Weight():
            return f"int8-g{tensor.group_size}"
        case Int4Weight(minimums=None):
            return f"int4-g{tensor.group_size}"
        case Int4Weight():
            return f"int4-affine-g{tensor.group_size}"
        case Fp8Weight():
            return "fp8"
        case Nf4Weight():
            return "nf4"
        case BnbInt8Weight():
            return "int8-bnb"
        case TiledWeight(name):
            return f"{name}-g32"
        case FpWeight(values):
            return FP_FORMATS[values.dtype]
    return FP_FORMATS[tensor.dtype]


def shape_of(tensor: PackedTensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def stored(tensor: PackedTensor) -> PackedTensor:
    """In the form that files hold and native kernels read: packed matrices as tiles, where those can hold them."""
    return tile(tensor) if isinstance(tensor, (Int8Weight, Int4Weight)) and fits_tiles(tensor) else tensor


def logical(tensor: PackedTensor) -> PackedTensor:
    """What the tensor holds, without the order that it lies in: the same for equal numbers in equal formats."""
    return untile(tensor) if isinstance(tensor, TiledWeight) else tensor


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
        case Fp8Weight(values, scales):
            return {f"{name}.f8": values, f"{name}.scales": scales}
        case Nf4Weight(quanta, scales):
            return {f"{name}.nf4": quanta, f"{name}.scales": scales}
        case BnbInt8Weight(quanta, scales):
            return {f"{name}.bnb8": quanta, f"{name}.scales": scales}
        case TiledWeight(format_name, tiles):
            return {name + TILE_SUFFIXES[format_name]: tiles}
    return {name: tensor}


def tensor_name(part_name: str) -> str:
    """The tensor that this part belongs to."""
    return next((part_name.removesuffix(s) for s in PART_SUFFIXES if part_name.endswith(s)), part_name)


def tensor_from_parts(name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> PackedTensor:
    """Inverse of `parts_of`, for a tensor of this shape: tiles do not tell how many of their rows are padding.

    Raises BrokenModelError when a part is missing or has an impossible shape.
    """
    tensor = _from_parts(name, parts, shape[0])
    if shape_of(tensor) != shape:
        raise BrokenModelError(f"Tensor {name} has shape {shape_of(tensor)}, expected {shape}.")
    return tensor


def _from_parts(name: str, parts: Mapping[str, Tensor], num_rows: int) -> PackedTensor:
    if name in parts:
        plain = parts[name]
        return FpWeight(plain) if plain.dim() == 2 else plain
    for format_name, suffix in TILE_SUFFIXES.items():
        if name + suffix in parts:
            return _checked_tiles(name, TiledWeight(format_name, parts[name + suffix], num_rows))
    try:
        scales = parts[f"{name}.scales"]
        if f"{name}.q8" in parts:
            return _checked(name, Int8Weight(parts[f"{name}.q8"], scales), torch.int8)
        if f"{name}.f8" in parts:
            return _checked_by_row(name, Fp8Weight(parts[f"{name}.f8"], scales))
        if f"{name}.nf4" in parts:
            return _checked_nf4(name, Nf4Weight(parts[f"{name}.nf4"], scales))
        if f"{name}.bnb8" in parts:
            return _checked_by_row(name, BnbInt8Weight(parts[f"{name}.bnb8"], scales))
        return _checked(name, Int4Weight(parts[f"{name}.q4"], scales, parts.get(f"{name}.minimums")), torch.uint8)
    except KeyError as error:
        raise BrokenModelError(f"Tensor part {error} is missing: the model is incomplete. Pull it again.") from None


def _checked_tiles(name: str, weight: TiledWeight) -> TiledWeight:
    tiles = weight.tiles
    fits = tiles.dim() == 3 and tuple(tiles.shape) == tiles_shape(weight.format, *weight.shape)
    if not fits or tiles.dtype != torch.uint8:
        raise _misfit(name)
    return weight


def _checked(name: str, weight: Int8Weight | Int4Weight, dtype: torch.dtype) -> Int8Weight | Int4Weight:
    quanta, scales = weight.quanta, weight.scales
    minimums = weight.minimums if isinstance(weight, Int4Weight) else None
    fits = (
        scales.dim() == 2
        and quanta.dim() == 3
        and quanta.shape[:2] == scales.shape
        and weight.group_size in GROUP_SIZES
        and quanta.dtype == dtype
        and scales.dtype in (torch.float16, torch.float32)
        and (minimums is None or (minimums.shape == scales.shape and minimums.dtype == scales.dtype))
    )
    if not fits:
        raise _misfit(name)
    return weight


def _checked_by_row(name: str, weight: Fp8Weight | BnbInt8Weight) -> Fp8Weight | BnbInt8Weight:
    """One scale a row."""
    numbers, dtype = (weight.values, torch.uint8) if isinstance(weight, Fp8Weight) else (weight.quanta, torch.int8)
    fits = numbers.dim() == 2 and numbers.shape[:1] == weight.scales.shape
    if not fits or numbers.dtype != dtype or weight.scales.dtype != torch.float32:
        raise _misfit(name)
    return weight


def _checked_nf4(name: str, weight: Nf4Weight) -> Nf4Weight:
    quanta, scales = weight.quanta, weight.scales
    fits = quanta.dim() == 2 and tuple(scales.shape) == (len(quanta), 2 * quanta.shape[1] / NF4_BLOCK)
    if not fits or quanta.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise _misfit(name)
    return weight


def _misfit(name: str) -> BrokenModelError:
    return BrokenModelError(f"The parts of tensor {name} do not fit together: the model is damaged. Pull it again.")


def is_finite(tensor: PackedTensor) -> bool:
    """No infinity or NaN among the numbers (packed: among scales and minimums)."""
    if isinstance(tensor, Fp8Weight) and bool((tensor.values & 0x7F == 0x7F).any()):
        return False
    parts = parts_of("", logical(tensor)).values()
    return all(bool(part.isfinite().all()) for part in parts if part.is_floating_point())
