"""What a pull tells while it runs, and how it ends early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError

Stage = Literal["resolve", "download", "verify", "import", "done"]


@dataclass(frozen=True)
class PullProgress:
    """One moment of a pull. `total_bytes` is 0 while it is not known."""

    stage: Stage
    done_bytes: int
    total_bytes: int
    source: str
    """Where the bytes come from, as in the catalogue."""
    message: str = ""
    """One line for the person: which source failed and why, or what happens now."""


OnProgress = Callable[[PullProgress], None]
OnBytes = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""
IsCancelled = Callable[[], bool]


class PullCancelled(UserError):
    """The person stopped the pull."""

    def __init__(self) -> None:
        super().__init__("Stopped.", "What was downloaded is kept; the next pull goes on from there.")


class SourceFailed(Exception):
    """This source cannot deliver; the next one is tried. The text is the reason, for a person."""


def human_bytes(count: float) -> str:
    """1234567 -> '1.2 MB' (powers of 1000, as disks and downloads are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
