"""Is there room? Asked before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .reports import human_bytes

SPARE_BYTES = 64_000_000
"""Left free, so that chats and logs can still be written afterwards."""


@dataclass(frozen=True)
class Need:
    folder: Path
    num_bytes: int
    purpose: str
    """What the bytes are for, after 'for': 'the download'."""


def require_space(needs: Sequence[Need]) -> None:
    """See that every file system has room for what goes there.

    Raises:
        UserError: one has not; says how much is needed for what, and how much is free.
    """
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        if need.num_bytes > 0:
            by_device.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for group in by_device.values():
        folder = _existing(group[0].folder)
        needed, free = sum(need.num_bytes for need in group) + SPARE_BYTES, shutil.disk_usage(folder).free
        if needed > free:
            parts = ", ".join(f"{human_bytes(need.num_bytes)} for {need.purpose}" for need in group)
            raise UserError(
                f"Not enough disk space in {folder}: {human_bytes(needed)} are needed, {human_bytes(free)} are free.",
                f"Needed are {parts}, and {human_bytes(SPARE_BYTES)} to spare. Free some space, or set CHATKV_HOME.",
            )


def import_bytes(weights_bytes: int) -> int:
    """What an installed model takes: its packed tensors as they are, plus the tokenizer."""
    return weights_bytes + weights_bytes // 50 + 16_000_000


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
