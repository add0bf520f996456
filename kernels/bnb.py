"""Packing and unpacking through bitsandbytes, on the device that the numbers lie on.

Its own products are not used: on some processors they round activations to bfloat16, and with 8 bits a row's result
would depend on the rows beside it.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .weights import NF4_BLOCK, BnbInt8Weight, BnbWeight, Nf4Weight

_HUB_CLIENT = "kernels"
"""The Hugging Face package of this name: where it is installed, importing bitsandbytes would download code with it."""
_importing = Lock()


class NoBitsandbytesError(ImportError):
    """bitsandbytes is not installed, or does not run here."""


def pack_nf4(matrix: Tensor) -> Nf4Weight:
    """Float [num_rows, num_columns], a multiple of 64 columns. Raises NoBitsandbytesError."""
    num_rows, num_columns = matrix.shape
    quanta, scales = _operations().quantize_4bit(matrix.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
    return Nf4Weight(quanta.view(num_rows, num_columns // 2), scales.view(num_rows, num_columns // NF4_BLOCK))


def pack_int8(matrix: Tensor) -> BnbInt8Weight:
    """Float [num_rows, num_columns]. Raises NoBitsandbytesError."""
    quanta, scales, _ = _operations().int8_vectorwise_quant(matrix)
    # A row of zeros was divided by its largest magnitude.
    return BnbInt8Weight(quanta.masked_fill_((scales == 0).unsqueeze(1), 0), scales)


def unpack(weight: BnbWeight, dtype: torch.dtype) -> Tensor:
    """[num_rows, num_columns]; in float32 the numbers of `reference.dequantise`. Raises NoBitsandbytesError."""
    operations = _operations()
    match weight:
        case Nf4Weight(quanta, scales):
            flat = (quanta.view(-1, 1), scales.view(-1))
            return _tensor(operations.dequantize_4bit(*flat, NF4_BLOCK, "nf4", weight.shape, dtype))
        case BnbInt8Weight(quanta, scales):
            return _tensor(operations.int8_vectorwise_dequant(quanta, scales)).to(dtype)


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


@cache
def _operations() -> Any:
    """torch.ops.bitsandbytes, registered."""
    with _importing:
        _import()
    return torch.ops.bitsandbytes


def _import() -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    hub_client, was_disabled = sys.modules.get(_HUB_CLIENT), logger.disabled
    # None: importing it fails, which bitsandbytes expects and would warn about.
    sys.modules[_HUB_CLIENT], logger.disabled = None, True  # type: ignore[assignment]
    try:
        import bitsandbytes  # noqa: F401 (registers the operations)
    except Exception as error:  # Its search for native libraries can end in anything.
        raise NoBitsandbytesError(
            f"bitsandbytes cannot be used here ({error}). Install it with: pip install bitsandbytes"
        ) from error
    finally:
        del sys.modules[_HUB_CLIENT]
        if hub_client is not None:
            sys.modules[_HUB_CLIENT] = hub_client
        logger.disabled = was_disabled
