"""Kills at every stage: what is there afterwards is nothing, or a whole model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chatkv.app.hub.install import sweep_leftovers, try_lock
from chatkv.app.hub.installed import list_installed
from chatkv.app.paths import Paths
from tests.app.hub.makers import PullLog, write_gguf

KILLED_PULL = """
import os, signal, sys
from chatkv.app.hub import install, installed
from chatkv.app.hub.pull import pull
from chatkv.app.paths import Paths
from tests.app.hub.makers import use_fake_importer_for_good

when, gguf = sys.argv[1:]
use_fake_importer_for_good()

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def on_progress(report):
    if report.stage == when and (when != "import" or report.done_bytes > report.total_bytes // 2):
        die()

if when == "seal":
    install._seal = die
if when == "rename":
    install._move_into_place = die
if when == "flush":
    move = install._move_into_place
    install._move_into_place = lambda folder, target: (folder.rename(target), die())
pull(Paths.from_env(), gguf, on_progress)
"""


def killed_pull(when: str, gguf: Path) -> None:
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", KILLED_PULL, when, str(gguf)], cwd=root, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()


@pytest.mark.parametrize("when", ["resolve", "download", "import", "seal", "rename"])
def test_a_kill_leaves_no_model_and_the_next_pull_succeeds(log: PullLog, tiny_gguf: Path, when: str) -> None:
    killed_pull(when, tiny_gguf)
    assert list_installed(log.paths) == []
    assert log.pull(tiny_gguf).is_usable
    assert [folder.name for folder in log.paths.models_dir.iterdir()] == ["tiny"]


@pytest.mark.parametrize("when", ["flush", "done"])
def test_a_kill_after_the_rename_leaves_a_whole_model(paths: Paths, tiny_gguf: Path, when: str) -> None:
    killed_pull(when, tiny_gguf)
    (model,) = list_installed(paths)
    assert model.is_usable


def test_the_sweep_spares_a_folder_that_a_live_process_works_in(paths: Paths) -> None:
    live, dead, removing = (paths.models_dir / name for name in (".installing-a-1", ".installing-b-2", ".removing-c-3"))
    for folder in (live, dead, removing):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    lock = try_lock(live)
    assert lock is not None
    try:
        assert sweep_leftovers(paths) == 2
        assert list(paths.models_dir.iterdir()) == [live]
    finally:
        os.close(lock)
    assert sweep_leftovers(paths) == 1
    assert sweep_leftovers(paths) == 0


def test_a_tokenizer_larger_than_the_model_is_damage(log: PullLog, tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(5000)]
    keys = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [1] * 5000, "tokenizer.ggml.merges": ["w 1"]}
    gguf = write_gguf(tmp_path / "large.gguf", keys=keys)
    with pytest.raises(Exception, match="its tokenizer has 5000 tokens, its model 4096"):
        log.pull(gguf)
    assert list(log.paths.models_dir.iterdir()) == []
