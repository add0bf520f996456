"""The tables of the documentation: what each kernel takes of each card, and what hot loops consist of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import triton

from .cards import CARDS
from .report import Row

HEAD = """# GPU kernels, as compiled

Written by `python -m tests.compile_gate --table assets/gpu-kernels.md`; no GPU is needed. Each kernel is compiled from
the engine's own launches, in every form that they have: weights, KV and compute dtypes, head sizes, widths. Nothing
here is a timing.
"""
RESOURCES = """## What they take of a card

Per card: how many forms; the most registers of a thread; the most shared memory; bytes spilled, if any.
"""
LOOPS = """## Hot loops of products with packed weights

Instructions a weight: those of all threads in one turn of the loop, over the weights that it takes in; where there are
many rows, most of them multiply. Conversions are instructions between integers and floats. Bytes a load: the mean of
loads from global memory, 16 at best.
"""
LOOP_COLUMNS = ("card", "kernel", "x", "group", "rows", "outputs", "columns", "instructions a weight")
MORE_COLUMNS = ("matrix instructions", "conversions", "bytes a load")
BLOCK_COLUMNS = 32


def write_table(file: Path, found: Mapping[str, Sequence[Row]]) -> None:
    parts = [HEAD + f"Compiled with triton {triton.__version__}.", RESOURCES + _resources(found), LOOPS + _loops(found)]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _resources(found: Mapping[str, Sequence[Row]]) -> str:
    rows = [["kernel", *(f"{name} ({CARDS[name].examples})" for name in found)]]
    for kernel in sorted({row["kernel"] for forms in found.values() for row in forms}):
        cells = (_cell([row for row in forms if row["kernel"] == kernel]) for forms in found.values())
        rows.append([f"`{kernel}`", *cells])
    return _table(rows)


def _cell(forms: Sequence[Row]) -> str:
    good = [row for row in forms if "error" not in row]
    if len(good) < len(forms):
        return f"{len(forms) - len(good)} of {len(forms)} do not compile"
    if not good:
        return "not launched"
    registers, spilled, shared = (max(row[key] for row in good) for key in ("num_registers", "spilled", "shared_bytes"))
    spills = f", {spilled} B spilled" if spilled else ""
    return f"{len(good)}: {registers}, {shared / 1024:.1f} KiB{spills}"


def _loops(found: Mapping[str, Sequence[Row]]) -> str:
    rows = {tuple(row) for name, forms in found.items() for row in _loop_rows(name, forms)}
    return _table([[*LOOP_COLUMNS, *MORE_COLUMNS], *map(list, sorted(rows))])


def _loop_rows(card: str, forms: Sequence[Row]) -> Iterator[list[str]]:
    for row in forms:
        constants = row["constants"]
        if not row.get("num_instructions") or "TILE_BLOCKS" not in constants or "TILE_OUTPUTS" not in constants:
            continue
        outputs, columns = constants["TILE_OUTPUTS"], constants["TILE_BLOCKS"] * BLOCK_COLUMNS
        each = row["num_instructions"] * 32 * row["num_warps"] / (outputs * columns)
        group = constants.get("GROUP_BLOCKS", 0) * BLOCK_COLUMNS
        shape = (group or "row", constants.get("TILE_ROWS", 1), outputs, columns)
        counts = (row["num_matrix"], row["num_conversions"], f"{row['mean_load_bytes']:.1f}")
        compute_dtype = row["case"].split(", ")[1]
        yield [card, f"`{row['kernel']}`", compute_dtype, *map(str, shape), f"{each:.1f}", *map(str, counts)]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
