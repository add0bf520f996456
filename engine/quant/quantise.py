"""A float matrix in another format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from chatkv.kernels.bnb import pack_int8, pack_nf4
from chatkv.kernels.cpu.threads import single_thread
from chatkv.kernels.weights import BnbInt8Weight, Fp8Weight, FpWeight, Int4Weight, Int8Weight, Nf4Weight, Weight

from . import float8
from .groups import INT4, INT4_AFFINE, INT8, Grid, from_largest, packed
from .search import searched
from .spec import QuantSpec

GRIDS = {"int8": INT8, "int4": INT4, "int4-affine": INT4_AFFINE}
CHUNK_NUMBERS = 1 << 18
"""Numbers quantised at a time: they stay in the processor's cache. Measured: larger chunks are slower."""

OnRows: TypeAlias = Callable[[int], None]
"""Gets the number of rows done so far; may raise to stop."""
PackedMatrix: TypeAlias = Int4Weight | Int8Weight | Fp8Weight | Nf4Weight | BnbInt8Weight


def quantise(matrix: FpWeight, spec: QuantSpec, on_rows: OnRows | None = None) -> Weight:
    """`matrix` in the format of `spec`, on the device that it lies on; the same matrix where it cannot have that
    format, as its columns do not divide into groups.

    "bf16" leaves floats of 16 bits alone. Raises NoBitsandbytesError where bitsandbytes is needed and missing.
    """
    values = matrix.values
    fitting = spec.fitting(values.shape[1])
    if fitting is None:
        return matrix
    if fitting.kind == "bf16":
        return FpWeight(values.bfloat16()) if values.dtype == torch.float32 else matrix
    return _by_rows(values, lambda rows: _quantised(rows, fitting), on_rows)


def _quantised(rows: Tensor, spec: QuantSpec) -> PackedMatrix:
    match spec.kind:
        case "nf4":
            return pack_nf4(rows)
        case "int8-bnb":
            return pack_int8(rows)
        case "fp8":
            return float8.quantised(rows, is_searched=spec.is_searched)
    return _in_groups(rows, GRIDS[spec.kind], spec)


def _in_groups(rows: Tensor, grid: Grid, spec: QuantSpec) -> Int4Weight | Int8Weight:
    groups = rows.unflatten(1, (-1, spec.group_size or 0))
    if spec.is_searched:
        return packed(grid, *searched(groups, grid))
    scales = from_largest(groups, grid)
    return packed(grid, scales, scales.quanta(groups, grid))


def _by_rows(values: Tensor, quantised: Callable[[Tensor], PackedMatrix], on_rows: OnRows | None) -> PackedMatrix:
    """Chunk by chunk, several at a time: operations this small are done sooner by one thread than by many."""
    step = max(1, CHUNK_NUMBERS // values.shape[1])

    def work(first: int) -> PackedMatrix:
        with single_thread(values.device.type == "cpu"):
            return quantised(values[first : first + step].float())

    parts: list[PackedMatrix] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        futures = [pool.submit(work, first) for first in range(0, len(values), step)]
        try:
            for future in futures:
                parts.append(future.result())
                if on_rows:
                    on_rows(min(len(parts) * step, len(values)))
        finally:
            pool.shutdown(cancel_futures=True)
    return _joined(parts)


def _joined(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """Rows below rows."""
    whole: dict[str, Any] = {}
    for field in fields(parts[0]):
        tensors = [getattr(part, field.name) for part in parts]
        whole[field.name] = None if tensors[0] is None else torch.cat(tensors)
    return replace(parts[0], **whole)
