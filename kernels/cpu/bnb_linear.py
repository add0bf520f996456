"""Float32 products with weights that bitsandbytes unpacks at each use: slow, but they stay small in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bnb import unpack
from ..weights import BnbInt8Weight, BnbWeight, Nf4Weight, Weight, num_bytes


@dataclass(frozen=True, slots=True)
class BnbLinear:
    """Matrices [N_i, num_columns], side by side; bias float32 [sum N_i] or None."""

    matrices: tuple[BnbWeight, ...]
    bias: Tensor | None
    num_rows: int
    num_columns: int

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(matrix) for matrix in self.matrices)

    def product(self, x: Tensor) -> Tensor:
        """[T, num_columns] contiguous -> [T, num_rows], without the bias."""
        return F.linear(x, torch.cat([unpack(matrix, torch.float32) for matrix in self.matrices]))


def bnb_linear(weights: Sequence[Weight], bias: Tensor | None) -> BnbLinear | None:
    """None where some of the weights are not bitsandbytes'."""
    matrices = tuple(weight for weight in weights if isinstance(weight, Nf4Weight | BnbInt8Weight))
    if len(matrices) < len(weights):
        return None
    return BnbLinear(matrices, bias, sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
