"""A model is planned, loaded, warmed up and run as on a GPU, its kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chatkv.app.service.model_device import Gpus, ModelPlacer
from chatkv.app.settings import Settings
from chatkv.engine.batch import Batch
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.native import write_weights
from chatkv.engine.models.source import open_source
from chatkv.kernels.device_facts import Card
from chatkv.kernels.devices import DeviceChoice
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny import BASE, random_tensors, sequence
from tests.kernels.triton import interpreter

from .fake_engine import fake_installed

LLAMA = BASE | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
CARD = Card(0, "NVIDIA GeForce RTX 3060", (8, 6), 12 << 30, 11 << 30)


@pytest.fixture
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_a_planned_model_answers(tmp_path: Path) -> None:
    interpreter.install()
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA)), "Q4_1")
    native = tmp_path / "native"
    native.mkdir()
    write_weights(open_source(tmp_path / "m.gguf"), native)
    installed = replace(fake_installed(), path=native)
    settings = Settings(context_tokens=64, kv_bytes=256 << 10, device="cuda", deterministic=True)
    gpus = Gpus(lambda wanted, gpu: DeviceChoice(CARD), lambda card: card, lambda card: "interpreter")
    progress: list[float] = []
    placer = ModelPlacer(installed, settings, 64, 90, frozenset({2}), 1, tmp_path, progress.append, gpus)
    decoder, runner, num_blocks, place = placer.place()
    assert decoder.kernels == "Triton on the interpreter, bf16, deterministic"
    assert place.device == "cuda"
    assert place.plan.startswith("Weights in int4-affine-g32, "), "kept as they are"
    assert num_blocks == len(runner.pool) == (256 << 10) // decoder.layout.block_bytes
    assert progress == sorted(progress)
    result = runner.execute(Batch((sequence([1, 2, 3, 4], 0, range(2), 1),)))
    (answer,) = result.sequences
    assert answer.error is None
    assert 0 <= answer.token_ids[0] < 90
