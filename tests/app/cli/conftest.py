from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatkv.app.service.ownership import can_connect

from .shell import Shell, serving


@pytest.fixture
def bare() -> Iterator[Shell]:
    """A home of its own where nothing runs."""
    home = Path(tempfile.mkdtemp(prefix="ck-"))
    shell = Shell(home)
    yield shell
    if can_connect(shell.paths.socket_path):  # A command of the test started one.
        shell("stop")
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def chatkv() -> Iterator[Shell]:
    """A home whose service is up; the tests of a module share it."""
    home = Path(tempfile.mkdtemp(prefix="ck-"))
    shell = Shell(home)
    with serving(shell):
        yield shell
    shutil.rmtree(home)
