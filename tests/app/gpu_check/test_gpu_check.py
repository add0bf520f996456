"""The GPU check where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatkv.app.gpu_check.bench_device import BenchDevice
from chatkv.app.gpu_check.command import EXIT_NO_GPU
from chatkv.app.gpu_check.results import Results
from tests.running_service import ROOT

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the check takes minutes")
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""
APP_LIBRARIES = {
    *("typer", "rich", "textual", "pydantic", "pydantic_settings", "platformdirs", "sqlite_utils", "fastapi", "httpx"),
    *("uvicorn", "huggingface_hub", "gguf", "xxhash", "cryptography", "markdown_it", "tokenizers", "safetensors"),
}


@without_gpu
@pytest.mark.parametrize(
    "command",
    [["app/gpu_check"], ["-m", "chatkv.app", "gpu-check"], ["-m", "chatkv.app.gpu_check"]],
    ids=["checkout", "app", "package"],
)
def test_without_a_gpu_it_says_so(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == EXIT_NO_GPU
    assert done.stderr.startswith("There is no CUDA device that this torch can use")
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_section_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chatkv.app", "gpu-check", "--only", "speed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no section speed; there are checks, model, figures, step, transfers" in done.stderr


@without_gpu
def test_the_command_line_passes_options_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from chatkv.app.cli import main; main()", "gpu-check", "--only", "step"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (EXIT_NO_GPU, "")


def test_a_captured_kernel_is_timed_by_replays_over_all_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []

    @contextmanager
    def graph(cuda_graph: object, stream: str) -> Iterator[None]:
        log.append(f"capture on {stream}")
        yield
        log.append("captured")

    def event(enable_timing: bool) -> Any:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.5)

    new_graph = lambda: SimpleNamespace(replay=lambda: log.append("replay"))  # noqa: E731
    stand_ins = {"graph": graph, "CUDAGraph": new_graph, "Event": event, "Stream": lambda device: "its own stream"}
    for name, stand_in in {**stand_ins, "synchronize": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    seconds = BenchDevice(torch.device("cuda", 0)).median_s(log.append, 5, is_captured=True)
    begin, end = log.index("capture on its own stream"), log.index("captured")
    assert log[begin + 1 : end] == [0, 1, 2, 3, 4]
    assert set(log[end + 1 :]) == {"replay"}
    assert seconds == pytest.approx(0.5e-3 / 5)


def test_a_failing_section_is_told_and_the_next_ones_run(tmp_path: Path) -> None:
    said: list[str] = []
    results = Results(said.append)
    with results.section("first"):
        results.check("sum", 0.5, 0.1)
        raise RuntimeError("no such kernel")
    with results.section("second"):
        results.figure("speed", 0.9, "of the copy rate", 0.85)
        results.figure("overhead", 0.4, "ms", 0.3, is_limit=True)
        results.check("not a number", float("nan"), 0.1)
        results.leave_out("disk", "needs xxhash")
    verdicts = [line.verdict for line in results.lines]
    assert verdicts == ["wrong", "failed", "met", "missed", "wrong", "left out"]
    assert not results.is_good
    assert len(said) == len(results.table().splitlines()) - 2 == 6
    results.write_json(tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["lines"][1]["note"] == "RuntimeError: no such kernel"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_check_runs_in_the_interpreter_and_finds_nothing_wrong(tmp_path: Path) -> None:
    """In a checkout and with no library but those that a machine with a GPU surely has."""
    file = tmp_path / "found.json"
    missing = WITHOUT.format(missing=APP_LIBRARIES)
    code = f"{missing}\nfrom tests.gpu_dry_run import dry_run\nsys.exit(dry_run(['--json', {str(file)!r}]))"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = json.loads(file.read_text())["lines"]
    verdicts = {line["verdict"] for line in lines}
    assert verdicts == {"right", "figure", "left out"}
    assert len(lines) > 100
    assert {line["name"] for line in lines if line["verdict"] == "left out"} == {
        *("fp8 matrices", "fp8 x fp8", "decode beside the store"),
        *(f"{kv_dtype} KV by way of disk" for kv_dtype in ("bf16", "fp16", "fp8", "int8")),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_come_back_by_way_of_the_disk_too(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.gpu_dry_run", "--only", "transfers", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    names = {line["name"] for line in json.loads(file.read_text())["lines"] if line["verdict"] == "right"}
    assert {f"{kv_dtype} KV by way of disk" for kv_dtype in ("bf16", "fp16", "fp8", "int8")} <= names
