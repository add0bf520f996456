"""Products with what bitsandbytes packs: unpacked at each use by its own kernels, multiplied by the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bnb import unpack
from ..weights import BnbInt8Weight, BnbWeight, Nf4Weight, Weight, num_bytes, select_rows


@dataclass(frozen=True, slots=True)
class BnbMatrix:
    """Matrices [N_i, K] on the device, side by side. `bias`: float32 [sum N_i] or None."""

    weights: tuple[BnbWeight, ...]
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(weight) for weight in self.weights) + (0 if self.bias is None else self.bias.nbytes)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int32 [T] -> float32 [T, K]: rows of the only matrix."""
        (table,) = self.weights
        rows = select_rows(table, token_ids)
        assert isinstance(rows, Nf4Weight | BnbInt8Weight)
        return unpack(rows, torch.float32)

    def product(self, x: Tensor, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """16-bit floats [T, K] -> [T, sum N_i]."""
        numbers = torch.cat([F.linear(x, unpack(weight, x.dtype)).to(out_dtype) for weight in self.weights], dim=1)
        if self.bias is not None:
            numbers += self.bias
        return numbers if out is None else out.copy_(numbers)


def bnb_matrix(weights: Sequence[Weight], bias: Tensor | None, device: torch.device) -> BnbMatrix | None:
    """None where the weights are not bitsandbytes'."""
    packed = [weight for weight in weights if isinstance(weight, Nf4Weight | BnbInt8Weight)]
    if len(packed) < len(weights):
        return None
    moved = tuple(type(weight)(weight.quanta.to(device), weight.scales.to(device)) for weight in packed)
    return BnbMatrix(moved, None if bias is None else bias.to(device, torch.float32))
