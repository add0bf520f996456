"""Every bug of the table is caught by its test."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.kernels.triton.seeded_bugs import ROOT, SEEDED_BUGS, SeededBug

A_TEST_FAILED = 1
"""pytest's exit status; others are errors of its own, or no tests at all."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", SEEDED_BUGS, ids=[bug.name for bug in SEEDED_BUGS])
def test_it_is_caught(bug: SeededBug) -> None:
    command = [sys.executable, "-m", "tests.kernels.triton.seeded_bugs", bug.name]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == A_TEST_FAILED, run.stdout + run.stderr


def test_the_table_keeps_up_with_the_kernels() -> None:
    for bug in SEEDED_BUGS:
        assert bug.source
    names = Counter(bug.name for bug in SEEDED_BUGS)
    assert max(names.values()) == 1
    assert len(names) >= 10
