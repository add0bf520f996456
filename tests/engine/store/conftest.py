"""A folder for stores, in memory where there is one: these tests open many."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # The helpers of these tests lie beside them.

MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture(params=["memory", "disk"])
def any_folder(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """For what file systems do differently: one in memory, and the one that tests run on."""
    return folder if request.param == "memory" else tmp_path


@pytest.fixture
def home(folder: Path) -> Path:
    """Where a store is to be."""
    return folder / "kv"
