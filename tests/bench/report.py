"""Figures as one line of JSON each, and a table at the end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of `values` lie; nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


@dataclass
class Report:
    """Collects figures. `against` is a figure measured in the same run; the ratio to it is what travels."""

    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, *, against: float | None = None, limit: str = "") -> None:
        row: dict[str, object] = {"name": name, "value": round(value, 4), "unit": unit}
        if against is not None:
            row["ratio"] = round(value / against, 4)
        if limit:
            row["limit"] = limit
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def print_table(self) -> None:
        table = Table(title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
        for column in ("figure", "value", "unit", "ratio", "limit"):
            table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
        for row in self.rows:
            table.add_row(*(str(row.get(key, "")) for key in ("name", "value", "unit", "ratio", "limit")))
        Console(width=120).print(table)
