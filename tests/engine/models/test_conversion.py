"""Weights that an earlier chatkv imported are rewritten when they are loaded, and nothing is lost on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from native_v1 import write_v1
from tiny import BASE, logits_of, random_ids, random_tensors, runner_of, sequence

from chatkv.engine.errors import BrokenModelError, ModelStorageError
from chatkv.engine.models import native
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.engine.models.weights_file import WeightsWriter, map_weights
from chatkv.kernels import KernelChoice

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
FORMATS = {"Q4_0": "int4-g32", "Q4_1": "int4-affine-g32", "Q8_0": "int8-g32", "BF16": "bf16"}


def old_model(tmp_path: Path, type_name: str = "Q4_1", *, is_aligned: bool = True) -> Path:
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA)), type_name)
    folder = tmp_path / "old"
    folder.mkdir()
    write_v1(open_source(tmp_path / "m.gguf"), folder, FORMATS[type_name], is_aligned=is_aligned)
    return folder


def logits(folder: Path) -> torch.Tensor:
    return logits_of(runner_of(load_model(folder)), sequence(random_ids(30, 211), 0, range(2)))[0]


def assert_manifest_fits(folder: Path, *, is_final: bool = False) -> None:
    """As `chatkv` looks at it before it loads anything."""
    files = json.loads((folder / "chatkv.json").read_text())["files"]
    for name, facts in files.items():
        assert (folder / name).stat().st_size == facts["size"], name
    if is_final:
        weights = folder / "model.safetensors"
        facts = files["model.safetensors"]
        assert facts["mtime_ns"] == weights.stat().st_mtime_ns
        assert facts["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
        assert set(os.listdir(folder)) == {"chatkv.json", "config.json", "model.safetensors"}


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("type_name", FORMATS)
def test_an_old_model_becomes_what_an_import_writes(
    tmp_path: Path, type_name: str, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fresh = old_model(tmp_path, type_name, is_aligned=is_aligned), tmp_path / "fresh"
    fresh.mkdir()
    old = map_weights(folder / "model.safetensors")
    assert write_weights(open_source(tmp_path / "m.gguf"), fresh).content_sha256 == old.content_sha256
    found = logits(folder)
    assert (folder / "model.safetensors").read_bytes() == (fresh / "model.safetensors").read_bytes()
    assert torch.equal(found, logits(fresh))
    assert_manifest_fits(folder, is_final=True)
    manifest = json.loads((folder / "chatkv.json").read_text())
    assert manifest["name"] == "old"
    assert manifest["size_bytes"] == sum(facts["size"] for facts in manifest["files"].values())

    def never(*_: Any) -> str:
        raise AssertionError("once is enough")

    monkeypatch.setattr(native, "convert_weights", never)
    monkeypatch.setattr(native, "content_hash", never)
    assert torch.equal(logits(folder), found)


def test_progress_rises_over_conversion_and_loading(tmp_path: Path) -> None:
    steps: list[float] = []
    load_model(old_model(tmp_path), KernelChoice(cpu_kernels="torch"), steps.append)
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert sum(step < 0.5 for step in steps) > 20
    assert sum(step > 0.5 for step in steps) > LLAMA["num_hidden_layers"]


def test_stopping_a_conversion_leaves_the_old_file(tmp_path: Path) -> None:
    folder = old_model(tmp_path)
    before = (folder / "model.safetensors").read_bytes()

    def stop(share: float) -> None:
        if share > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(folder, on_progress=stop)
    assert (folder / "model.safetensors").read_bytes() == before
    assert_manifest_fits(folder, is_final=True)


class Killed(BaseException):
    pass


def dying_after(num_operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next renames, syncs and deletions happen, and from then on none: nothing tidies up after a kill."""
    left = num_operations

    def patched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, operation)

    patched(os, "fsync")
    patched(Path, "replace")
    patched(Path, "unlink")


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    expected = None
    for num_operations in range(100):
        (tmp_path / str(num_operations)).mkdir()
        folder = old_model(tmp_path / str(num_operations))
        with pytest.MonkeyPatch.context() as patch:
            dying_after(num_operations, patch)
            try:
                load_model(folder)
                was_killed = False
            except Killed:
                was_killed = True
        assert_manifest_fits(folder)
        found = logits(folder)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        assert_manifest_fits(folder)
        load_model(folder)
        assert "model.safetensors" in json.loads((folder / "chatkv.json").read_text())["files"]
        if not was_killed:
            break
    assert 8 < num_operations < 99


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, r"disk is full: about 1 MB must be free"), (errno.EACCES, "Permission denied")]
)
def test_a_disk_that_refuses_is_named_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    folder = old_model(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(WeightsWriter, "finish", refuse)
        with pytest.raises(ModelStorageError, match=words):
            load_model(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert_manifest_fits(folder, is_final=True)
    load_model(folder)
    assert map_weights(folder / "model.safetensors").format == "chatkv-weights-2"


def test_damaged_old_weights_are_refused_and_kept(tmp_path: Path) -> None:
    folder = old_model(tmp_path)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(BrokenModelError, match="changed since it was imported"):
        load_model(folder)
    assert file.read_bytes() == data
    assert {file.name for file in folder.iterdir()} == {"chatkv.json", "config.json", "model.safetensors"}


def test_two_loads_at_once_convert_once(tmp_path: Path) -> None:
    folder = old_model(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        hashes = [f.result().fingerprint_facts()["content_sha256"] for f in [pool.submit(load_model, folder)] * 2]
    assert hashes[0] == hashes[1]
    assert_manifest_fits(folder, is_final=True)


def test_a_model_without_a_manifest_is_converted_too(tmp_path: Path) -> None:
    folder = old_model(tmp_path)
    (folder / "chatkv.json").unlink()
    load_model(folder)
    assert map_weights(folder / "model.safetensors").format == "chatkv-weights-2"
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
