"""Whatever changes what a stored number means changes the fingerprint, and so every block's name; nothing else does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny import BASE, decoder_of, logits_of, random_ids, random_tensors, runner_of, sequence, tiled_decoder_of

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.errors import BrokenModelError
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.kernels import KernelChoice
from chatkv.kernels.cpu import backend as cpu_backend
from chatkv.kernels.cpu.digest import fixed_numbers

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
KEY = b"k" * 32
WEIGHTS, MANIFEST = "model.safetensors", "chatkv.json"


def install(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Import a model into `folder`, over what is there, with a manifest as `chatkv pull` writes it."""
    folder.mkdir(exist_ok=True)
    tensors = random_tensors(ModelConfig.from_hf(LLAMA)) if tensors is None else tensors
    source = folder.parent / "source.gguf"
    write_gguf(source, "llama", LLAMA, tensors)
    write_weights(open_source(source), folder)
    status = (folder / WEIGHTS).stat()
    files = {WEIGHTS: {"size": status.st_size, "mtime_ns": status.st_mtime_ns}}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))
    return folder


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def names_of(model: Decoder) -> set[bytes]:
    """What the blocks of one prompt are called with this model."""
    hasher = BlockHasher(KEY, CacheFingerprint.from_facts(model.fingerprint_facts()))
    names, parent = set(), hasher.root_hash
    for start in range(0, 64, 16):
        parent = hasher.block_hash(parent, range(start, start + 16))
        names.add(parent)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return install(tmp_path / "model")


def test_the_same_model_elsewhere_has_the_same_names(folder: Path, tmp_path: Path) -> None:
    names = names_of(load_model(folder))
    assert len(names) == 4
    assert names_of(load_model(install(tmp_path / "other name"))) == names
    configure(folder, max_position_embeddings=77, eos_token_id=5)
    assert names_of(load_model(folder)) == names
    assert names_of(load_model(folder, kv_dtype="fp32")) == names, "auto is fp32 on the CPU"


def test_one_changed_weight_at_the_same_path(folder: Path) -> None:
    before = names_of(load_model(folder))
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 7] += 1e-3
    install(folder, tensors)
    assert not before & names_of(load_model(folder))


def test_a_weight_changed_in_place_is_noticed_though_the_size_is_equal(folder: Path) -> None:
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)[0]
        file.seek(-5, 2)
        file.write(bytes([byte ^ 1]))
    assert (folder / WEIGHTS).stat().st_size == size
    with pytest.raises(BrokenModelError, match="changed since it was imported"):
        load_model(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}},
        {"rms_norm_eps": 2e-5},
    ],
)
def test_a_changed_config_at_the_same_path(folder: Path, fields: dict[str, Any]) -> None:
    before = names_of(load_model(folder))
    configure(folder, **fields)
    assert not before & names_of(load_model(folder))


def test_a_changed_kv_dtype(folder: Path) -> None:
    assert not names_of(load_model(folder)) & names_of(load_model(folder, kv_dtype="int8"))


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("engine.models.decoder.FORMAT_VERSION", 2),
        ("engine.models.decoder.NUMERICS_EPOCH", 99),
        ("engine.models.decoder.BLOCK_SIZE", 32),
        ("engine.kv_layout.LAYOUT", ("k_or_v", "layer", "kv_head", "position", "dimension")),
        ("engine.kv_layout.IMAGE_ALIGNMENT", 1 << 16),
        ("kernels.cpu.backend.KEY_TILE", 128),
    ],
)
def test_a_changed_constant(monkeypatch: pytest.MonkeyPatch, constant: str, value: object) -> None:
    before = names_of(decoder_of(LLAMA))
    monkeypatch.setattr(f"chatkv.{constant}", value)
    assert not before & names_of(decoder_of(LLAMA))


@pytest.mark.parametrize(
    ("constant", "value"),
    [("engine.kv_layout.LARGEST_QUANTUM", 120), ("engine.kv_layout.SCALE_DTYPE", torch.float16)],
)
def test_a_changed_scale_scheme(monkeypatch: pytest.MonkeyPatch, constant: str, value: object) -> None:
    plain, quantised = (names_of(decoder_of(LLAMA, kv_dtype=kv_dtype)) for kv_dtype in ("fp32", "int8"))
    monkeypatch.setattr(f"chatkv.{constant}", value)
    assert not quantised & names_of(decoder_of(LLAMA, kv_dtype="int8"))
    assert names_of(decoder_of(LLAMA)) == plain


def test_another_instruction_set_or_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names_of(decoder_of(LLAMA))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
        assert not before & names_of(decoder_of(LLAMA))
    silu_mul = cpu_backend.reference.silu_mul
    with monkeypatch.context() as patch:
        patch.setattr(cpu_backend.reference, "silu_mul", lambda x: silu_mul(x).nextafter(torch.tensor(9.0)))
        assert not before & names_of(decoder_of(LLAMA))
    assert before == names_of(decoder_of(LLAMA))


def test_native_kernels_have_names_of_their_own_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_names = names_of(tiled_decoder_of(LLAMA, "int8", KernelChoice(cpu_kernels="torch"), kv_dtype="int8"))
    names = names_of(tiled_decoder_of(LLAMA, "int8"))
    int8_names = names_of(tiled_decoder_of(LLAMA, "int8", kv_dtype="int8"))
    assert len(torch_names | names | int8_names) == 12
    assert names_of(tiled_decoder_of(LLAMA, "int8", KernelChoice(num_threads=3))) == names
    for constant, value in (
        ("engine.models.decoder.NUMERICS_EPOCH", 99),
        ("engine.kv_layout.LAYOUT_BY_DIMENSION", {"keys": ("position",), "values": ("position",)}),
        ("kernels.cpu.native.model.KEY_TILE", 64),
        ("kernels.cpu.native.model._arithmetic_digest", lambda library, variant: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"chatkv.{constant}", value)
            assert not names & names_of(tiled_decoder_of(LLAMA, "int8")), constant
    assert names_of(tiled_decoder_of(LLAMA, "int8")) == names


def test_an_unknown_kv_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'int3'.*'auto', 'fp32', 'int8'"):
        load_model(folder, kv_dtype="int3")


def test_the_numbers_of_the_digest_are_the_same_everywhere() -> None:
    numbers = fixed_numbers(2, 3)
    by_hand = [(i * 2654435761 % (1 << 20)) - (1 << 19) for i in range(1, 7)]
    assert (numbers * (1 << 19)).flatten().tolist() == by_hand


@pytest.mark.slow
def test_a_process_with_another_instruction_set_shares_names_only_if_it_shares_bits() -> None:
    here = (names_of(decoder_of(LLAMA)), logits_digest())
    code = "import test_fingerprint as t; print(sorted(t.names_of(t.decoder_of(t.LLAMA))), t.logits_digest(), sep='|')"
    for environment in ({}, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}):
        paths = ":".join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parent.parent))
        names, digest = (
            subprocess.run(
                [sys.executable, "-c", code], env={"PYTHONPATH": paths, **environment}, capture_output=True, check=True
            )
            .stdout.decode()
            .strip()
            .split("|")
        )
        if not environment:
            assert (names, digest) == (str(sorted(here[0])), here[1])
        assert (names == str(sorted(here[0]))) <= (digest == here[1])


def logits_digest() -> str:
    (logits,) = logits_of(runner_of(decoder_of(LLAMA)), sequence(random_ids(300, 211), 0, range(20)))
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()
