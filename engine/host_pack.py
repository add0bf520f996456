"""Many small arrays for the device, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64
"""Bytes. Kernels are compiled for pointers to multiples of 16."""


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors on the device with these arrays' shapes, dtypes and contents. Returns before the copy is done: what runs
    on the current stream afterwards sees it. From pinned memory on CUDA."""
    starts: list[int] = []
    num_bytes = 0
    for array in arrays:
        starts.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    image = host.numpy()
    for array, start in zip(arrays, starts, strict=True):
        image[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
