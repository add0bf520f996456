"""GGUF's block formats, taken apart without rounding: every scale, minimum and quantum is kept as it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.kernels.weights import FpWeight, Int4Weight, Int8Weight

from ..errors import BrokenModelError
from .formats import PackedTensor

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""32 values: fp16 scale, fp16 minimum (Q4_1 only), then the quanta."""
SUPPORTED_TYPES = ("F32", "F16", "BF16", *BLOCK_BYTES)


def tensor_from_gguf(name: str, type_name: str, data: npt.NDArray[np.generic]) -> PackedTensor:
    """`data` as the gguf package maps it: [num_rows, row bytes] uint8 for packed types and BF16, numbers otherwise.

    `type_name` is one of SUPPORTED_TYPES. The result owns its memory.
    """
    if type_name in BLOCK_BYTES:
        if data.ndim != 2:
            raise BrokenModelError(f"Tensor {name} has type {type_name} but is not a matrix: the file is damaged.")
        return _unpack(type_name, np.ascontiguousarray(data))
    if type_name == "BF16":
        plain = torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16)
    else:
        plain = torch.from_numpy(np.array(data))
    return FpWeight(plain) if plain.dim() == 2 else plain


def _unpack(type_name: str, data: npt.NDArray[np.generic]) -> Int4Weight | Int8Weight:
    blocks = torch.from_numpy(data.reshape(data.shape[0], -1, BLOCK_BYTES[type_name]).copy())
    scales = _half(blocks, 0)
    match type_name:
        case "Q8_0":
            return Int8Weight(blocks[..., 2:].contiguous().view(torch.int8), scales)
        case "Q4_0":
            return Int4Weight(blocks[..., 2:].contiguous(), scales)
        case _:
            return Int4Weight(blocks[..., 4:].contiguous(), scales, _half(blocks, 2))


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)
