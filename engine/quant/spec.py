"""What float matrices are to become, and what that takes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from chatkv.kernels.weights import GROUP_SIZE, GROUP_SIZES, NF4_BLOCK

VERSION = 1
"""Raised by hand whenever the same matrix would become other numbers: what was made before is then made again."""

WeightFormat: TypeAlias = Literal["auto", "as-is", "bf16", "fp8", "int8", "int4", "nf4", "int8-bnb"]
"""What can be asked for."""
Kind: TypeAlias = Literal["bf16", "fp8", "int8", "int4", "int4-affine", "nf4", "int8-bnb"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
_SCALE_BYTES = {"int8": 2, "int4": 2, "int4-affine": 4}
"""Per group; int4-affine has a minimum beside the scale."""


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One format of float matrices. What is quantised already in a model's file is never touched."""

    kind: Kind
    group_size: int | None = None
    """Columns that share a scale: of int8, int4 (quanta from -8 to 7) and int4-affine (with a minimum)."""
    is_searched: bool = False
    """Scales with the least mean squared error are searched for; else the largest number decides."""

    def __post_init__(self) -> None:
        has_groups = self.kind in _SCALE_BYTES
        assert self.group_size in GROUP_SIZES if has_groups else self.group_size is None

    @property
    def name(self) -> str:
        """As `formats.format_of` calls the result."""
        return self.kind if self.group_size is None else f"{self.kind}-g{self.group_size}"

    @property
    def for_tables(self) -> QuantSpec | None:
        """Of the embedding table and the head; None: they stay as they are.

        They decide more than other matrices, and few formats are cheaper than 8 bits in groups and as good.
        """
        match self.kind:
            case "bf16" | "int8":
                return self
            case "nf4" | "int8-bnb":
                return None
        return QuantSpec("int8", GROUP_SIZE)

    @property
    def identity(self) -> str:
        """All that decides the result, as canonical JSON."""
        return json.dumps(self.facts(), sort_keys=True, separators=(",", ":"))

    def facts(self) -> dict[str, str | int]:
        tables = self.for_tables
        scales = "least squared error" if self.is_searched else "largest number"
        return {
            "version": VERSION,
            "matrices": self.name,
            "tables": tables.name if tables else "as they are",
            "scales": scales,
        }

    def fitting(self, num_columns: int) -> QuantSpec | None:
        """For matrices of so many columns: perhaps with smaller groups; None: they cannot have this format."""
        if self.kind == "nf4":
            return self if num_columns % NF4_BLOCK == 0 else None
        if self.group_size is None:
            return self
        sizes = [size for size in GROUP_SIZES if size <= self.group_size and num_columns % size == 0]
        return replace(self, group_size=max(sizes)) if sizes else None

    def packed_bytes(self, num_rows: int, num_columns: int) -> int | None:
        """Of a matrix [num_rows, num_columns], padding of tiles left out; None: it cannot have this format."""
        spec = self.fitting(num_columns)
        if spec is None:
            return None
        count = num_rows * num_columns
        match spec.kind:
            case "bf16":
                return 2 * count
            case "fp8" | "int8-bnb":
                return count + 4 * num_rows
            case "nf4":
                return count // 2 + 4 * count // NF4_BLOCK
        assert spec.group_size is not None
        quanta = count if spec.kind == "int8" else count // 2
        return quanta + _SCALE_BYTES[spec.kind] * math.ceil(count / spec.group_size)


def spec_of(weight_format: WeightFormat) -> QuantSpec | None:
    """What a format means, with groups of 32, which kernels for the CPU read too; None: nothing is changed.

    What "auto" means depends on model and device.
    """
    assert weight_format != "auto"
    return {
        "as-is": None,
        "bf16": QuantSpec("bf16"),
        "fp8": QuantSpec("fp8", is_searched=True),
        "int8": QuantSpec("int8", GROUP_SIZE),
        "int4": QuantSpec("int4-affine", GROUP_SIZE, is_searched=True),
        "nf4": QuantSpec("nf4"),
        "int8-bnb": QuantSpec("int8-bnb"),
    }[weight_format]
