"""Makes the helper modules beside these tests importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[object]:
    from disk_fixtures import Disk  # the path to it is set above

    opened = Disk(tmp_path / "store")
    yield opened
    opened.close()
