from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chatkv.app.paths import Paths
from tests.app.hub.makers import PullLog, use_fake_importer, write_gguf


@pytest.fixture
def paths(home: Path) -> Paths:
    found = Paths.from_env()
    found.make_private()
    return found


@pytest.fixture
def fake_importer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_importer(lambda name, module: monkeypatch.setitem(sys.modules, name, module))


@pytest.fixture
def log(paths: Paths, fake_importer: None) -> PullLog:
    return PullLog(paths)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")
