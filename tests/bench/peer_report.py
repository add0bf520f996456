"""Pairs of figures: the peer's, ours, and ours as a multiple of the peer's with its limit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from .report import Report, median


@dataclass
class Samples:
    """Figures by name, then by server, of all repeats."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def add(self, name: str, server: str, value: float) -> None:
        self.values[name][server].append(value)

    def report(self, report: Report, unit: str, limits: dict[str, str], of: Callable[..., float] = median) -> None:
        """Medians; `limits` maps a figure to the limit of its ratio, such as ">= 2.5"."""
        for name, servers in self.values.items():
            against: float | None = None
            for server, values in servers.items():
                add_compared(report, f"{name}, {server}", of(values), unit, against, limits.get(name, ""))
                against = of(values)


def add_compared(
    report: Report, name: str, value: float, unit: str, against: float | None = None, limit: str = ""
) -> None:
    """The limit is of the ratio to `against`, and said to be met or missed; none without a figure to compare with."""
    said = f"ratio {judged(value / against, limit)}" if limit and against is not None else ""
    report.add(name, value, unit, against=against, limit=said)


def judged(value: float, limit: str) -> str:
    """`limit` is "<= number" or ">= number"."""
    relation, bound = limit.split()
    is_met = value <= float(bound) if relation == "<=" else value >= float(bound)
    return f"{limit}: {'met' if is_met else 'MISSED'}"
