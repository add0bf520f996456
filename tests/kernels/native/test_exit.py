"""A process may end while a step runs on a daemon thread: a load or an engine that nobody waits for any more."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.running_service import ROOT

PROGRAM = """
import threading
from chatkv.kernels.cpu.native.digest import digest_of, fixed_program
from chatkv.kernels.cpu.native.library import native_library
from chatkv.kernels.cpu.native.model import NativeModel

model = NativeModel(fixed_program(), native_library(), 3)
digest_of(lambda rows, kv: model.run(rows, kv).logits)
step = model._step
step.ops, step.num_ops, step.num_rows = model._lowered.ops_from(0), 2, 100  # embedding and norm of rows it had before
has_begun = threading.Event()

def run_steps():
    while True:
        model._threads.run(step)
        has_begun.set()

threading.Thread(target=run_steps, daemon=True).start()
has_begun.wait()
"""


def test_a_process_ends_in_peace_while_a_step_runs() -> None:
    environment = {**os.environ, "MALLOC_PERTURB_": "85"}  # what is freed is overwritten
    command = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert (answer.returncode, answer.stderr) == (0, "")
