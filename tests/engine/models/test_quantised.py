"""Weights in another format are made once, kept beside the model, and used only when they are whole and its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from tiny import BASE, decoder_of, logits_of, random_ids, random_tensors, runner_of, sequence

from chatkv.engine.batch import Batch
from chatkv.engine.block_hash import CacheFingerprint
from chatkv.engine.errors import BrokenModelError, ModelStorageError, UnsupportedModelError
from chatkv.engine.models import quantised
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.names import EMBEDDING, HEAD, tensor_shapes
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.engine.models.weight_choice import choose_weights
from chatkv.engine.models.weights_file import WeightsWriter, map_weights
from chatkv.engine.quant import spec as spec_module
from chatkv.engine.quant.formats import format_of
from chatkv.engine.quant.spec import QuantSpec, WeightFormat
from chatkv.kernels import KernelChoice, bnb
from chatkv.kernels.reference import dequantise
from chatkv.kernels.weights import TiledWeight

LLAMA = BASE | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
}
WEIGHTS = "model.safetensors"


def install(folder: Path, type_name: str = "F32", seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    source = folder.parent / f"{folder.name}.gguf"
    write_gguf(source, "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA), seed), type_name)
    write_weights(open_source(source), folder)
    status = (folder / WEIGHTS).stat()
    files = {WEIGHTS: {"size": status.st_size, "mtime_ns": status.st_mtime_ns}}
    (folder / "chatkv.json").write_text(json.dumps({"files": files}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return install(tmp_path / "model")


def made(folder: Path) -> Path:
    """The one folder with made weights."""
    (found,) = (folder / "quantised").iterdir()
    return found


def logits(model: Decoder) -> torch.Tensor:
    return logits_of(runner_of(model), sequence(random_ids(30, 211), 0, range(2)))[0]


def fingerprint(model: Decoder) -> bytes:
    return CacheFingerprint.from_facts(model.fingerprint_facts()).digest


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are converted."""
    names: list[str] = []
    convert = quantised.converted

    def counting(name: str, *args: Any) -> Any:
        names.append(name)
        return convert(name, *args)

    monkeypatch.setattr(quantised, "converted", counting)
    return names


FORMATS: dict[WeightFormat, tuple[str, str, float]] = {
    "bf16": ("bf16", "bf16", 0.04),
    "fp8": ("fp8", "int8-g32", 0.2),
    "int8": ("int8-g32", "int8-g32", 0.06),
    "int4": ("int4-affine-g32", "int8-g32", 0.45),
    "nf4": ("nf4", "fp32", 0.5),
    "int8-bnb": ("int8-bnb", "fp32", 0.1),
}
"""What is asked for -> matrices, embedding and head, and how far logits may be off on average, of their spread (those
of another model: 1.1)."""


@pytest.mark.parametrize("asked", FORMATS)
def test_floats_become_what_was_asked_for(folder: Path, asked: WeightFormat) -> None:
    true, model = logits(load_model(folder)), load_model(folder, weight_format=asked)
    matrices, tables, bound = FORMATS[asked]
    weights = map_weights(made(folder) / WEIGHTS)
    config = model.config
    shapes = {EMBEDDING: (211, 128), HEAD: (211, 128), "model.layers.1.mlp.down_proj.weight": (128, 192)}
    assert config.has_untied_head
    found = [format_of(weights.read(name, shape)) for name, shape in shapes.items()]
    assert found == [tables, tables, matrices]
    assert model.weight_format == matrices
    assert f'"{asked}"' in model.weight_origin
    error = (logits(model) - true).abs().mean() / true.std()
    assert 0 < float(error) < bound
    assert torch.equal(logits(load_model(folder, weight_format=asked)), logits(model))


@pytest.mark.parametrize("asked", ["nf4", "int8-bnb"])
def test_bitsandbytes_weights_generate_what_their_numbers_generate(folder: Path, asked: WeightFormat) -> None:
    model = load_model(folder, weight_format=asked)
    weights, shapes = map_weights(made(folder) / WEIGHTS), tensor_shapes(model.config)
    tensors = {name: weights.read(name, shapes[name]) for name in shapes}
    plain = {name: t if isinstance(t, torch.Tensor) else dequantise(t) for name, t in tensors.items()}
    as_floats = decoder_of(LLAMA, plain)
    assert (logits(model) - logits(as_floats)).abs().max() < 1e-3
    assert generated(model) == generated(as_floats)
    assert model.weight_bytes < 0.4 * as_floats.weight_bytes, "they stay packed"


def generated(model: Decoder, num_tokens: int = 24) -> list[int]:
    runner, ids, new = runner_of(model), [], random_ids(20, 211)
    for _ in range(num_tokens):
        start = 20 + len(ids) - 1 if ids else 0
        result = runner.execute(Batch([sequence(new, start, range(3), samples=1)]))
        new = list(result.sequences[0].token_ids)
        ids += new
    return ids


def test_it_is_made_once_with_progress(folder: Path, counted: list[str]) -> None:
    first: list[float] = []
    load_model(folder, on_progress=first.append, weight_format="int4")
    assert len(counted) == len(set(counted)) > 20
    assert first == sorted(first)
    assert first[-1] == 1.0
    assert sum(share < 0.9 for share in first) > 20
    again: list[float] = []
    load_model(folder, on_progress=again.append, weight_format="int4")
    assert len(counted) == len(set(counted))
    assert again[-1] == 1.0


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_what_is_quantised_in_the_file_is_kept_exactly(tmp_path: Path, type_name: str) -> None:
    folder = install(tmp_path / "model", type_name)
    plain = load_model(folder)
    for asked in spec_module.WEIGHT_FORMATS:
        model = load_model(folder, weight_format=asked)
        assert fingerprint(model) == fingerprint(plain)
        assert model.weight_origin == "as in the model's file"
        assert all(isinstance(weight, TiledWeight) for weight in model.program.matrices)
    assert not (folder / "quantised").exists()


def test_auto_on_the_cpu_makes_8_bits_where_native_kernels_then_run_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, weight_format="auto")
    assert model.weight_format == "int8-g32"
    assert model.kernels.startswith("native")
    assert "native kernels" in model.weight_origin
    asked = load_model(folder, weight_format="int8")
    assert fingerprint(asked) == fingerprint(model)
    shutil.rmtree(folder / "quantised")
    for choice in (KernelChoice(cpu_kernels="torch"), KernelChoice()):
        if choice == KernelChoice():
            monkeypatch.setattr("chatkv.engine.models.weight_choice.why_none_here", lambda: "no compiler")
        model = load_model(folder, choice, weight_format="auto")
        assert model.weight_format == "fp32"
        assert model.weight_origin == "as in the model's file"
    assert not (folder / "quantised").exists()


def test_the_fingerprint_knows_the_quantiser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WeightFormat] = ["as-is", "bf16", "fp8", "int4", "nf4", "int8-bnb"]
    torch_kernels = KernelChoice(cpu_kernels="torch")
    prints = {fingerprint(load_model(folder, torch_kernels, weight_format=name)) for name in asked}
    assert len(prints) == len(asked)
    as_is, int4 = (load_model(folder, weight_format=name) for name in ("as-is", "int4"))
    assert "quantiser" not in as_is.fingerprint_facts(), "names of blocks stored by earlier versions stay valid"
    facts = int4.fingerprint_facts()
    assert facts["content_sha256"] == as_is.fingerprint_facts()["content_sha256"]
    assert facts["quantiser"] == {
        "version": 1,
        "matrices": "int4-affine-g32",
        "tables": "int8-g32",
        "scales": "least squared error",
        "content_sha256": map_weights(next((folder / "quantised").glob("int4*")) / WEIGHTS).content_sha256,
    }
    monkeypatch.setattr(spec_module, "VERSION", 2)
    assert fingerprint(load_model(folder, weight_format="int4")) != fingerprint(int4)


def test_another_version_of_the_quantiser_makes_it_anew(
    folder: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(folder, weight_format="int8")
    monkeypatch.setattr(spec_module, "VERSION", 2)
    load_model(folder, weight_format="int8")
    assert len(counted) == 2 * len(set(counted))
    assert '"version":2' in map_weights(made(folder) / WEIGHTS).facts["quantiser"]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
def test_damaged_weights_are_made_again(folder: Path, damage: Callable[[Path], None], counted: list[str]) -> None:
    expected = logits(load_model(folder, weight_format="int8"))
    damage(made(folder) / WEIGHTS)
    assert torch.equal(logits(load_model(folder, weight_format="int8")), expected)
    assert len(counted) == 2 * len(set(counted))


def test_what_another_model_was_turned_into_is_never_used(folder: Path, tmp_path: Path) -> None:
    other = install(tmp_path / "other", seed=1)
    load_model(other, weight_format="int8")
    expected = logits(load_model(folder, weight_format="int8"))
    name = made(folder).name
    shutil.rmtree(made(folder))
    shutil.copytree(made(other), folder / "quantised" / name)
    assert torch.equal(logits(load_model(folder, weight_format="int8")), expected)


def test_weights_under_the_name_of_another_format_are_never_used(folder: Path) -> None:
    expected = logits(load_model(folder, weight_format="int8"))
    load_model(folder, weight_format="int4")
    int8, int4 = (next((folder / "quantised").glob(f"{kind}*")) for kind in ("int8", "int4"))
    shutil.rmtree(int8)
    int4.rename(int8)
    assert torch.equal(logits(load_model(folder, weight_format="int8")), expected)


def test_a_copied_model_keeps_what_was_made(folder: Path, tmp_path: Path, counted: list[str]) -> None:
    """Times of files may change on the way: then the content is read once, and trusted from then on."""
    load_model(folder, weight_format="int8")
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    os.utime(made(tmp_path / "copy") / WEIGHTS, ns=(1, 1))
    shutil.copystat(folder / WEIGHTS, tmp_path / "copy" / WEIGHTS)
    load_model(tmp_path / "copy", weight_format="int8")
    assert len(counted) == len(set(counted))
    recorded = json.loads((made(tmp_path / "copy") / "chatkv.json").read_text())["files"][WEIGHTS]
    assert recorded["mtime_ns"] == 1


def test_imported_anew_the_old_leftovers_go(folder: Path) -> None:
    for asked in ("int8", "int4"):
        load_model(folder, weight_format=asked)
    (folder / "quantised" / ".writing-int8-0123").mkdir()
    install(folder, seed=2)
    load_model(folder, weight_format="int8")
    assert made(folder).name.startswith("int8-g32-")


class Killed(BaseException):
    pass


def dying_after(num_operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next writes, renames and deletions happen, and from then on none: nothing tidies up after a kill."""
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

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (WeightsWriter, "write")):
        patched(owner, name)
    patched(shutil, "rmtree")


def test_a_kill_at_any_moment_leaves_nothing_half(tmp_path: Path) -> None:
    install(tmp_path / "model")
    expected = logits(load_model(tmp_path / "model", weight_format="int8"))
    for num_operations in range(0, 200, 1):
        shutil.rmtree(tmp_path / "model" / "quantised")
        with pytest.MonkeyPatch.context() as patch:
            dying_after(num_operations, patch)
            try:
                load_model(tmp_path / "model", weight_format="int8")
                was_killed = False
            except Killed:
                was_killed = True
        for file in (tmp_path / "model").glob("quantised/[!.]*/*.safetensors"):
            assert torch.equal(logits(load_model(tmp_path / "model", weight_format="int8")), expected), file
        assert torch.equal(logits(load_model(tmp_path / "model", weight_format="int8")), expected)
        assert not list((tmp_path / "model").glob("quantised/.*"))
        if not was_killed:
            break
    assert 30 < num_operations < 199


def test_stopping_leaves_nothing(folder: Path) -> None:
    def stop(share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(folder, on_progress=stop, weight_format="int8")
    assert not list((folder / "quantised").iterdir())


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the disk is full. Free some space"), (errno.EACCES, "Permission denied")]
)
def test_a_disk_that_refuses_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(WeightsWriter, "finish", refuse)
    with pytest.raises(ModelStorageError, match=words):
        load_model(folder, weight_format="int8")
    assert not list((folder / "quantised").iterdir())
    assert load_model(folder, weight_format="as-is").weight_format == "fp32"


def test_without_room_auto_runs_what_there_is_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightsWriter, "finish", refuse)
    model = load_model(folder, weight_format="auto")
    assert model.weight_format == "fp32"
    assert model.weight_origin.startswith("as in the model's file. Weights in int8-g32 could not be kept")
    assert "the disk is full" in model.weight_origin
    assert "quantiser" not in model.fingerprint_facts()


def test_sixteen_bits_are_not_made_of_sixteen_bits(tmp_path: Path) -> None:
    folder = install(tmp_path / "model", "BF16")
    assert load_model(folder, weight_format="bf16").weight_format == "bf16"
    assert not (folder / "quantised").exists()


def test_a_gpu_rounds_floats_to_16_bits_itself(folder: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    shapes, weights = tensor_shapes(config), map_weights(folder / WEIGHTS)
    for kernels, wanted in ((KernelChoice("cuda"), None), (KernelChoice(), QuantSpec("bf16"))):
        choice = choose_weights(QuantSpec("bf16"), kernels, config, weights, shapes)
        assert choice.spec == wanted
        assert "16 bits on the GPU" in choice.reason or wanted
    assert choose_weights("auto", KernelChoice("cuda"), config, weights, shapes).spec is None, "its planner decides"


def test_matrices_that_do_not_divide_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LLAMA, "intermediate_size", 208)
    folder = install(tmp_path / "model")
    assert load_model(folder, weight_format="auto").weight_format == "fp32"
    assert not (folder / "quantised").exists()
    model = load_model(folder, weight_format="int4")
    assert model.weight_format == "int4-affine-g32", "most of them"
    assert "throughout" in model.kernels
    assert logits(model).isfinite().all()


def test_a_planner_asks_for_groups_of_its_own(folder: Path) -> None:
    model = load_model(folder, weight_format=QuantSpec("int4-affine", 128, is_searched=True))
    assert model.weight_format == "int4-affine-g128"
    assert "room" in model.weight_origin
    assert logits(model).isfinite().all()


def test_room_is_asked_for_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 936 * 10**6, 64 * 10**6 + 100_000))
    with pytest.raises(ModelStorageError, match=r"int8-g32 take 1 MB in .*, where 65 MB are free and 64 MB must stay"):
        load_model(folder, weight_format="int8")
    assert not list((folder / "quantised").iterdir())


def test_two_loads_at_once_make_it_once(folder: Path, counted: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        models = [f.result() for f in [pool.submit(load_model, folder, weight_format="int8") for _ in range(2)]]
    assert len(counted) == len(set(counted))
    assert fingerprint(models[0]) == fingerprint(models[1])


def test_without_bitsandbytes_nf4_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise bnb.NoBitsandbytesError(
            "bitsandbytes cannot be used here (no). Install it with: pip install bitsandbytes"
        )

    with monkeypatch.context() as patch:
        patch.setattr(bnb, "_operations", missing)
        with pytest.raises(UnsupportedModelError, match=r"Weights in nf4 cannot be made: .*pip install bitsandbytes"):
            load_model(folder, weight_format="nf4")
    assert not list((folder / "quantised").iterdir())
    load_model(folder, weight_format="nf4")
    monkeypatch.setattr(bnb, "_operations", missing)
    with pytest.raises(UnsupportedModelError, match=r"Weights in nf4 cannot be read: .*pip install bitsandbytes"):
        load_model(folder, weight_format="nf4")


def test_numbers_too_large_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 7] = 1e9
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors)
    write_weights(open_source(tmp_path / "m.gguf"), folder)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down_proj.*too large for int8-g32"):
        load_model(folder, weight_format="int8")
    assert load_model(folder, weight_format="fp8").weight_format == "fp8"


def test_a_changed_source_is_refused_before_anything_is_made_of_it(folder: Path) -> None:
    flip(folder / WEIGHTS)
    with pytest.raises(BrokenModelError, match="changed since it was imported"):
        load_model(folder, weight_format="int8")
    assert not (folder / "quantised").exists()
