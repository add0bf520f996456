"""What the check has found, as lines while it runs, as one table at the end, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["right", "wrong", "met", "missed", "figure", "failed", "left out"]
_BAD = ("wrong", "failed")


@dataclass(frozen=True, slots=True)
class Line:
    section: str
    name: str
    verdict: Verdict
    value: float | None = None
    unit: str = ""
    target: float | None = None
    """What a figure is to reach; a check's largest allowed error."""
    note: str = ""


@dataclass(slots=True)
class Results:
    """`say`: gets every line as soon as it is known."""

    say: Callable[[str], None]
    facts: dict[str, Any] = field(default_factory=dict)
    """The machine."""
    lines: list[Line] = field(default_factory=list)
    has_targets: bool = True
    """A dry run's figures mean nothing."""
    _section: str = ""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What fails in it is a line; the sections after it run."""
        self._section = name
        try:
            yield
        except Exception as error:  # a check that cannot run must not hide the others
            self._add(Line(name, name, "failed", note=f"{type(error).__name__}: {str(error)[:300]}"))

    def check(self, name: str, error: float, allowed: float, note: str = "") -> None:
        """An error relative to the largest number of the reference."""
        verdict: Verdict = "right" if error <= allowed else "wrong"  # NaN is wrong
        self._add(Line(self._section, name, verdict, error, "of the largest", allowed, note))

    def figure(
        self, name: str, value: float, unit: str, target: float | None = None, *, is_limit: bool = False, note: str = ""
    ) -> None:
        """`target`: at least that; `is_limit`: at most."""
        verdict: Verdict = "figure"
        if target is not None and self.has_targets:
            verdict = "met" if (value <= target if is_limit else value >= target) else "missed"
        self._add(Line(self._section, name, verdict, value, unit, target, note))

    def leave_out(self, name: str, why: str) -> None:
        self._add(Line(self._section, name, "left out", note=why))

    @property
    def is_good(self) -> bool:
        return not any(line.verdict in _BAD for line in self.lines)

    def write_json(self, file: Path) -> None:
        document = {"machine": self.facts, "lines": [asdict(line) for line in self.lines]}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """GitHub's form, readable as it is."""
        rows = [("section", "what", "value", "target", "verdict"), ("---", "---", "---:", "---:", "---")]
        rows += [(line.section, line.name, _value(line), _number(line.target), _verdict(line)) for line in self.lines]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
        )

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        target = f" (target {_number(line.target)})" if line.target is not None else ""
        self.say(f"{line.section}: {line.name}: {_value(line)}{target} {_verdict(line)}".replace("  ", " "))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _value(line: Line) -> str:
    return f"{_number(line.value)} {line.unit}".strip()


def _verdict(line: Line) -> str:
    return f"{line.verdict}: {line.note}" if line.note else line.verdict
