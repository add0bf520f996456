"""The real model behind a real service, each in a home of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatkv.app.hub.pull import pull
from chatkv.app.paths import Paths
from tests.running_service import MODEL, RunningService

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory, default_gguf: Path) -> Path:
    """The default model, imported once for all tests."""
    paths = Paths.under(tmp_path_factory.mktemp("models"))
    pull(paths, f"file:{default_gguf}", lambda progress: None, name=MODEL)
    return paths.models_dir


def make_home(folder: Path, models_dir: Path) -> Path:
    """A home that has the model and nothing else."""
    (folder / "data").mkdir(parents=True, mode=0o700)
    (folder / "data" / "models").symlink_to(models_dir)
    return folder


@pytest.fixture
def e2e_home(tmp_path: Path, models_dir: Path) -> Path:
    return make_home(tmp_path / "home", models_dir)


@contextmanager
def running_service(home: Path, **settings: str) -> Iterator[RunningService]:
    """Started, and ready to answer; checks its own integrity after every step."""
    running = RunningService(home, CHATKV_CHECK_INTEGRITY="true", **settings)
    try:
        asyncio.run(running.start())
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningService]:
    """One for all tests that leave nothing behind but cached blocks."""
    with running_service(make_home(tmp_path_factory.mktemp("service") / "home", models_dir)) as running:
        yield running


@pytest.fixture
def chatkv(e2e_home: Path) -> Iterator[Run]:
    """Runs the command as a shell would: `chatkv("ask", "hello", input="...")`."""
    environment = {**os.environ, "CHATKV_HOME": str(e2e_home), "CHATKV_PORT": "0"}

    def run(*arguments: str, input: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chatkv.app", *arguments]
        return subprocess.run(
            command, env=environment, input=input, capture_output=True, text=True, timeout=timeout, check=False
        )

    yield run
    run("stop")
