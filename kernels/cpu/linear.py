"""Float32 products with weights that are laid out once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import dequantise
from ..weights import Weight
from .bnb_linear import BnbLinear, bnb_linear
from .invariance import measured_once, smallest_safe, unsafe_row_counts

ROWS_HINT = 8
"""Batch size that oneDNN lays weights out for. Measured: good from 1 to 512 rows."""

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """float32 [num_rows, num_columns], either plain or in oneDNN's blocked layout; bias [num_rows] or None."""

    weight: Tensor
    bias: Tensor | None
    num_rows: int
    num_columns: int
    is_onednn: bool

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.num_columns * FP32_BYTES

    def product(self, x: Tensor) -> Tensor:
        """[T, num_columns] contiguous -> [T, num_rows], without the bias."""
        if self.is_onednn:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
            return y
        return F.linear(x, self.weight)


class LinearPath:
    """Prepares and runs every matrix of a model, so that a row's bits do not depend on the other rows."""

    def __init__(self) -> None:
        # Packed oneDNN products take a third of the time of F.linear (MKL) here, and keep one order of summation
        # from two rows on.
        self.is_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        self.row_multiple: int | None = None
        self._shapes: dict[tuple[type, int, int], CpuLinear | BnbLinear] = {}
        """Kind and shape -> the first matrix of that."""

    @property
    def name(self) -> str:
        library = "onednn" if self.is_onednn else "blas"
        return library if self.row_multiple else f"{library}-single-rows"

    def prepare(self, weights: Sequence[Weight], bias: Tensor | None) -> CpuLinear | BnbLinear:
        prepared = bnb_linear(weights, bias) or self._laid_out(weights, bias)
        self._shapes.setdefault((type(prepared), prepared.num_rows, prepared.num_columns), prepared)
        return prepared

    def _laid_out(self, weights: Sequence[Weight], bias: Tensor | None) -> CpuLinear:
        matrix = torch.cat([dequantise(weight) for weight in weights]) if len(weights) > 1 else dequantise(weights[0])
        num_rows, num_columns = matrix.shape
        # A copy in any case: mapped files are not aligned for vector loads, and alignment can change bits.
        laid_out = (
            torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), ROWS_HINT)
            if self.is_onednn
            else matrix.clone(memory_format=torch.contiguous_format)
        )
        return CpuLinear(laid_out, bias, num_rows, num_columns, self.is_onednn)

    def seal(self) -> None:
        """Find the row multiple for every shape prepared. Where none is safe, rows are multiplied one by one."""
        unsafe: set[int] = set()
        for key, linear in self._shapes.items():
            unsafe |= measured_once(
                ("linear", self.is_onednn, *key), partial(unsafe_row_counts, linear.product, linear.num_columns)
            )
        self.row_multiple = smallest_safe(unsafe)

    def functions(self) -> Iterator[tuple[Callable[[Tensor], Tensor], int]]:
        """Every prepared shape's first matrix as a function that `linear` runs, and its number of columns."""
        for prepared in self._shapes.values():
            yield partial(self.linear, prepared=prepared), prepared.num_columns

    def linear(self, x: Tensor, prepared: CpuLinear | BnbLinear) -> Tensor:
        """[T, num_columns] -> [T, num_rows]."""
        num_tokens = x.shape[0]
        if self.row_multiple:
            padding = -num_tokens % self.row_multiple
            y = prepared.product(F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous())[:num_tokens]
        else:
            y = torch.cat([prepared.product(row.clone()) for row in x.split(1)])
        return y if prepared.bias is None else y.add_(prepared.bias)
