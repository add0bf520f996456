"""The service leaves the processor to others first, where Linux weighs sessions against each other too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from chatkv.app.service.process import stand_back

stand_back(3)
print(os.nice(0))
print(open("/proc/self/autogroup").read())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
@pytest.mark.parametrize("is_leader", [True, False])
def test_a_session_of_its_own_is_niced_and_a_shared_one_is_left_alone(is_leader):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=is_leader,
    )
    nice, autogroup = done.stdout.split("\n")[:2]
    assert int(nice) >= 3
    if is_leader:
        assert autogroup.endswith("nice 3")
    else:
        assert autogroup == AUTOGROUP.read_text().strip()
