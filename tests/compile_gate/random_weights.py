"""Weights that mean nothing, in every format."""

from __future__ import annotations

import torch

from chatkv.kernels.weights import Fp8Weight, FpWeight, Int4Weight, Int8Weight, Weight

FORMATS = ("fp", "fp8", "int8", "int8-g128", "int4", "int4-affine", "int4-g64", "int4-g128", "int4-g128-affine")


def weight_of(weight_format: str, num_rows: int, num_columns: int) -> Weight:
    """weight_format: one of FORMATS; "affine": with minimums; "g64": groups of 64 columns."""
    kind, *details = weight_format.split("-")
    if kind == "fp":
        return FpWeight(torch.zeros(num_rows, num_columns, dtype=torch.bfloat16))
    if kind == "fp8":
        return Fp8Weight(torch.zeros(num_rows, num_columns, dtype=torch.uint8), torch.ones(num_rows))
    group = next((int(detail[1:]) for detail in details if detail.startswith("g")), 32)
    scales = torch.ones(num_rows, num_columns // group, dtype=torch.float16)
    if kind == "int8":
        return Int8Weight(torch.zeros(*scales.shape, group, dtype=torch.int8), scales)
    quanta = torch.zeros(*scales.shape, group // 2, dtype=torch.uint8)
    return Int4Weight(quanta, scales, scales.clone() if "affine" in details else None)
