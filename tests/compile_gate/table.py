"""The table of the documentation: the worst form of each kernel on each card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

from .cards import CARDS
from .report import Row

HEAD = """# GPU kernels, as compiled

Written by `python -m tests.compile_gate --table assets/gpu-kernels.md`; no GPU is needed. Each kernel is compiled
from the engine's own launches, in every form that they have (weights, KV and compute dtypes, head sizes, widths). Per
card: forms, the most registers of a thread, bytes spilled, the most shared memory. Nothing here is a timing.
"""


def write_table(file: Path, found: Mapping[str, Sequence[Row]]) -> None:
    lines = [HEAD, f"Compiled with triton {triton.__version__}.\n"]
    cards = list(found)
    lines.append("| kernel | " + " | ".join(f"{name} ({CARDS[name].examples})" for name in cards) + " |")
    lines.append("|---|" + "---|" * len(cards))
    for kernel in sorted({row["kernel"] for rows in found.values() for row in rows}):
        cells = (_cell([row for row in found[name] if row["kernel"] == kernel]) for name in cards)
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(rows: Sequence[Row]) -> str:
    good = [row for row in rows if "error" not in row]
    if len(good) < len(rows):
        return f"{len(rows) - len(good)} of {len(rows)} do not compile"
    if not good:
        return "not launched"
    registers, spilled, shared = (max(row[key] for row in good) for key in ("num_registers", "spilled", "shared_bytes"))
    return f"{len(good)}: {registers} registers, {spilled} B spilled, {shared / 1024:.1f} KiB"
