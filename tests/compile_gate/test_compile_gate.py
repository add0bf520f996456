"""Every kernel of the GPU compiles for every supported card, from the engine's own launches: no error, no spill, no
more shared memory than the card has. In processes of their own, since this one interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running_service import ROOT

KERNELS = {
    "add_rms_norm_kernel",
    "chunk_kernel",
    "decode_combine_kernel",
    "decode_split_kernel",
    "fp8_gemm_kernel",
    "gate_mul_kernel",
    "gather_kernel",
    "int4_gemm_kernel",
    "int4_gemv_kernel",
    "int8_gemm_kernel",
    "pick_kernel",
    "rotate_and_store_kernel",
}
"""Some that must be among those launched: a gate that sees nothing lets everything through."""
ONLY_WITH_FP8 = {"fp8_gemm_kernel"}
CARDS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


def gate(folder: Path, card: str, lane: str) -> list[dict[str, Any]]:
    """Fails with what the gate says when it refuses."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    file = folder / "gate.json"
    command = [sys.executable, "-m", "tests.compile_gate", "--card", card, "--lane", lane, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text())[card]
    return rows


@pytest.mark.timeout(600)
def test_the_kernels_of_usual_models_compile(tmp_path: Path) -> None:
    rows = gate(tmp_path, "sm_86", "fast")
    assert {row["kernel"] for row in rows} >= KERNELS - ONLY_WITH_FP8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("card", CARDS)
def test_every_form_of_every_kernel_compiles(tmp_path: Path, card: str) -> None:
    rows = gate(tmp_path, card, "all")
    assert {row["kernel"] for row in rows} >= KERNELS
    assert len(rows) > 100


def test_a_kernel_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    """The gate itself, on kernels that are wrong in known ways."""
    command = [sys.executable, "-m", "tests.compile_gate.wrong_kernels"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["error", "spills", "memory", "good"], done.stdout
