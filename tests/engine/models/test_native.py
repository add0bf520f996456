"""The native directory: written once, exact, and never trusted when it changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from tiny import BASE, decoder_of, logits_of, random_ids, random_tensors, runner_of, sequence

from chatkv.engine.errors import BrokenModelError
from chatkv.engine.models import native
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.names import tensor_shapes
from chatkv.engine.models.native import WeightsInfo, load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.engine.models.weights_file import MappedWeights, content_hash, map_weights
from chatkv.kernels import KernelChoice
from chatkv.kernels.reference import dequantise

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
TORCH = KernelChoice(cpu_kernels="torch")


@pytest.fixture(params=["F32", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def type_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def imported(tmp_path: Path, type_name: str = "Q4_1") -> tuple[Path, WeightsInfo]:
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA)), type_name)
    folder = tmp_path / "native"
    folder.mkdir()
    return folder, write_weights(open_source(tmp_path / "m.gguf"), folder)


def write_manifest(folder: Path) -> None:
    status = (folder / "model.safetensors").stat()
    files = {"model.safetensors": {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": ""}}
    (folder / "chatkv.json").write_text(json.dumps({"files": files}))


def test_a_loaded_model_computes_what_its_source_holds(tmp_path: Path, type_name: str) -> None:
    folder, info = imported(tmp_path, type_name)
    tensors = dict(open_source(tmp_path / "m.gguf").tensors())
    plain = {name: t if isinstance(t, torch.Tensor) else dequantise(t) for name, t in tensors.items()}
    ids = sequence(random_ids(30, 211), 0, range(2))
    (expected,) = logits_of(runner_of(decoder_of(LLAMA, plain)), ids)
    (found,) = logits_of(runner_of(load_model(folder, TORCH)), ids)
    assert torch.equal(found, expected)
    assert info.num_params == sum(t.numel() for t in plain.values())
    assert info.num_bytes < (folder / "model.safetensors").stat().st_size
    names = {"F32": "fp32", "BF16": "bf16", "Q4_0": "int4-g32", "Q4_1": "int4-affine-g32", "Q8_0": "int8-g32"}
    assert info.weight_format == names[type_name]


def test_packed_matrices_are_stored_as_tiles(tmp_path: Path, type_name: str) -> None:
    folder, info = imported(tmp_path, type_name)
    suffixes = {"Q4_0": ".t4", "Q4_1": ".t4a", "Q8_0": ".t8"}
    weights = map_weights(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights.part_names(name) == [name + suffixes.get(type_name, "")]
    assert weights.content_sha256 == info.content_sha256
    assert content_hash(weights, tensor_shapes(ModelConfig.from_hf(LLAMA))) == info.content_sha256


def test_the_hash_tells_weights_apart_and_nothing_else(tmp_path: Path) -> None:
    hashes = []
    for index, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_gguf(folder / "m.gguf", "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA), seed), "Q4_0")
        hashes.append(write_weights(open_source(folder / "m.gguf"), folder).content_sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_progress_reaches_the_total_and_may_stop_the_import(tmp_path: Path) -> None:
    folder, _ = imported(tmp_path)
    source = open_source(tmp_path / "m.gguf")
    calls: list[tuple[int, int]] = []
    write_weights(source, folder, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (source.total_bytes, source.total_bytes)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(source, folder, stop)
    with pytest.raises(BrokenModelError):
        load_model(folder)


@pytest.mark.parametrize("choice", [KernelChoice(), TORCH])
def test_loading_reports_progress(tmp_path: Path, choice: KernelChoice) -> None:
    folder, _ = imported(tmp_path)
    steps: list[float] = []
    load_model(folder, choice, steps.append)
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert choice is not TORCH or len(steps) > LLAMA["num_hidden_layers"]


def test_the_hash_is_computed_again_only_when_size_or_time_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = imported(tmp_path)
    hashed: list[MappedWeights] = []

    def counted(weights: MappedWeights, shapes: Mapping[str, tuple[int, ...]]) -> str:
        hashed.append(weights)
        return content_hash(weights, shapes)

    monkeypatch.setattr(native, "content_hash", counted)
    write_manifest(folder)
    load_model(folder)
    assert not hashed
    os.utime(folder / "model.safetensors", ns=(1, 1))
    load_model(folder)
    assert len(hashed) == 1


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    folder, _ = imported(tmp_path)
    write_manifest(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    with pytest.raises(BrokenModelError, match="changed since it was imported"):
        load_model(folder)


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    folder, _ = imported(tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(BrokenModelError, match="Pull the model again"):
        load_model(folder)
    file.write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(BrokenModelError, match="do not fit together"):
        load_model(folder)
    file.unlink()
    with pytest.raises(BrokenModelError, match="missing"):
        load_model(folder)


def test_fingerprint_facts_hold_what_decides_numbers(tmp_path: Path) -> None:
    folder, info = imported(tmp_path)
    facts = load_model(folder, TORCH).fingerprint_facts()
    assert json.loads(json.dumps(facts)) == facts
    numerics = facts.pop("numerics")
    assert numerics["backend"] == "cpu-torch"
    assert numerics["linear"] in ("onednn", "blas", "onednn-single-rows", "blas-single-rows")
    frequencies = facts.pop("rope")
    assert len(bytes.fromhex(frequencies["inverse_frequencies_f32"])) == 4 * 8
    assert frequencies["attention_factor"] == 1.0
    assert facts == {
        "format_version": 1,
        "numerics_epoch": 2,
        "shape": {
            "architecture": "LlamaForCausalLM",
            "vocab_size": 211,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_layers": 3,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 9.999999747378752e-06,
            "has_qkv_bias": False,
            "has_output_bias": False,
            "has_mlp_bias": False,
            "has_qk_norm": False,
            "is_head_tied": False,
            "layer_ropes": [True, True, True],
        },
        "layer_windows": [None, None, None],
        "soft_cap": None,
        "content_sha256": info.content_sha256,
        "weight_format": "int4-affine-g32",
        "kv": {
            "dtype": "float32",
            "scales": None,
            "layout": ["layer", "k_or_v", "kv_head", "position", "dimension"],
            "block_bytes": 12288,
        },
        "block_size": 16,
        "adapters": [],
    }
