"""What earlier runs of a benchmark have left in a home's store."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def kv_folder(home: Path) -> Path:
    return home / "cache" / "kv"


def forget_store(home: Path) -> None:
    """Prompts of an earlier run must be computed again."""
    if kv_folder(home).exists():
        aside = Path(tempfile.mkdtemp(dir=home))
        kv_folder(home).rename(aside / "kv")
        shutil.rmtree(aside)
