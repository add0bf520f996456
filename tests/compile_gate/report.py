"""What the gate says of each kernel, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .cards import Card
from .compile_only import Compiled
from .instructions import hot_loop
from .resources import resources_of

Row: TypeAlias = dict[str, Any]
"""A kernel in one form, ready for JSON: case, kernel, constants; then error, or its resources and counts."""
COLUMNS = ("num_registers", "spilled", "shared_bytes", "num_warps", "num_instructions", "mean_load_bytes")


class Refusal(NamedTuple):
    kernel: str
    reason: str


def row_of(case: str, compiled: Compiled, with_counts: bool) -> Row:
    row: Row = {"case": case, "kernel": compiled.name, "constants": compiled.constants}
    kernel = compiled.result
    if isinstance(kernel, Exception):
        return row | {"error": f"{type(kernel).__name__}: {str(kernel)[-600:]}"}
    row |= resources_of(kernel)._asdict()
    if with_counts and kernel.metadata.target.backend == "cuda":
        try:
            row |= hot_loop(kernel)._asdict()
        except AssertionError:
            row["num_instructions"] = 0  # no loop
    return row


def refusals(card: Card, rows: Sequence[Row]) -> list[Refusal]:
    """Errors, spills, too much shared memory. AMD's spills are not a reason: it is not supported yet."""
    refused = []
    for row in rows:
        name = f"{row['kernel']} ({row['case']}: {row['constants']})"
        if "error" in row:
            refused.append(Refusal(name, row["error"]))
            continue
        if row["spilled"] and not card.is_amd:
            refused.append(Refusal(name, f"spills {row['spilled']} bytes"))
        if row["shared_bytes"] > card.shared_bytes:
            refused.append(
                Refusal(name, f"{row['shared_bytes']} bytes of shared memory, there are {card.shared_bytes}")
            )
    return refused
