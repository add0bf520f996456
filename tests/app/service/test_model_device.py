"""Where a model comes to run: made-up cards in the place of real ones, a tiny model, and what people are told."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import InstalledModel
from chatkv.app.service import model_device
from chatkv.app.service.load_thread import LoadAbandonedError
from chatkv.app.service.model_device import Gpus, ModelPlacer, PlacedModel
from chatkv.app.service.model_loader import host_tier_bytes
from chatkv.app.settings import Settings
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.native import write_weights
from chatkv.engine.models.source import open_source
from chatkv.engine.planner import PoolTooSmallError, machine_memory_bytes
from chatkv.kernels.device_facts import Card
from chatkv.kernels.devices import DeviceChoice, DeviceError
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny import BASE, random_tensors

from .fake_engine import fake_installed

GIB = 1 << 30
CARD = Card(1, "NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, 23 * GIB, has_display=True)
LLAMA = BASE | {"architectures": ["LlamaForCausalLM"], "head_dim": 16, "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> InstalledModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "m.gguf", "llama", LLAMA, random_tensors(ModelConfig.from_hf(LLAMA)), "BF16")
    native = folder / "native"
    native.mkdir()
    write_weights(open_source(folder / "m.gguf"), native)
    return replace(fake_installed(), path=native)


class FakeRunner:
    """In the place of the GPU's: it takes note of what it is given."""

    made: list[FakeRunner]
    largest_pool = 1 << 30
    """In blocks."""

    def __init__(self, model: Any, num_blocks: int, num_tokens: int, max_context_tokens: int, eos_ids: object) -> None:
        if num_blocks > self.largest_pool:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_blocks, self.num_tokens, self.max_context_tokens = num_blocks, num_tokens, max_context_tokens
        self.made.append(self)

    def warm_up(self, max_batched_tokens: int, on_progress: Callable[[float], None]) -> None:
        on_progress(0.5)
        on_progress(1.0)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    """The CPU computes; all else is as on a card."""

    class Runner(FakeRunner):
        made: list[FakeRunner] = []  # noqa: RUF012

    module = types.ModuleType("chatkv.engine.device_runner")
    module.DeviceRunner = Runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return Runner


def no_gpu(wanted: str, gpu: int | None) -> DeviceChoice:
    if wanted == "cuda":
        raise DeviceError("There is an NVIDIA GPU, but no driver for it.", "Install it.")
    return DeviceChoice(None, "It runs on the CPU: no driver.", is_surprising=True)


def place(installed: InstalledModel, gpus: Gpus, progress: list[float] | None = None, **settings: Any) -> PlacedModel:
    report = (lambda share: None) if progress is None else progress.append
    # On the CPU a pool gets its first pages ready on a thread: a small one, or tests end while that works.
    options = {"context_tokens": 1024, "cpu_kernels": "torch", "kv_bytes": 4 << 20, **settings}
    return ModelPlacer(
        installed, Settings(**options), 1024, 200, frozenset({2}), 1, Path("triton-cache"), report, gpus
    ).place()


def gpus(card: Card = CARD, **options: Any) -> Gpus:
    choice = DeviceChoice(card, **options)
    return Gpus(lambda wanted, gpu: choice, lambda card: replace(card, has_context=True), lambda card: "cpu")


def test_on_a_card_with_room_all_of_it_is_planned(installed: InstalledModel, runner: type[FakeRunner]) -> None:
    progress: list[float] = []
    placed = place(installed, gpus(note="Of 2 GPUs it uses GPU 1.", warning="An old driver."), progress, kv_bytes=None)
    assert placed.place.device == "cuda"
    assert placed.place.card == CARD.name
    assert placed.place.note == "Of 2 GPUs it uses GPU 1. An old driver."
    assert placed.place.notice == "An old driver.", "which of two cards is no news"
    assert placed.place.plan.startswith("Weights in bf16, ")
    assert f"{placed.num_blocks:,} blocks of 16 tokens" in placed.place.plan
    (made,) = runner.made
    assert placed.runner is made
    assert (made.num_blocks, made.num_tokens, made.max_context_tokens) == (placed.num_blocks, 200, 1024)
    assert placed.num_blocks * 3 * 2 * 2 * 16 * 16 * 2 < 23 * GIB
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


def test_weights_are_made_in_the_format_that_was_planned(installed: InstalledModel, runner: type[FakeRunner]) -> None:
    placed = place(installed, gpus(), weight_format="int8")
    assert placed.place.plan.startswith("Weights in int8-g32, ")
    assert placed.decoder.weight_format == "int8-g32"
    as_they_are = place(installed, gpus())
    assert as_they_are.place.plan.startswith("Weights in bf16, ")
    assert as_they_are.decoder.weight_format == "bf16"


def test_the_gpu_that_is_set_is_asked_for(installed: InstalledModel, runner: type[FakeRunner]) -> None:
    asked: list[tuple[str, int | None]] = []

    def choose(wanted: str, gpu: int | None) -> DeviceChoice:
        asked.append((wanted, gpu))
        return DeviceChoice(CARD)

    place(installed, replace(gpus(), choose=choose), device="cuda", gpu=1)
    assert asked == [("cuda", 1)]


def test_cuda_that_cannot_be_had_is_a_persons_error_and_auto_says_why_the_cpu(installed: InstalledModel) -> None:
    with pytest.raises(UserError) as refused:
        place(installed, Gpus(no_gpu), device="cuda")
    assert str(refused.value) == "There is an NVIDIA GPU, but no driver for it.\nInstall it."
    placed = place(installed, Gpus(no_gpu))
    assert placed.place.device == "cpu"
    assert placed.place.note == placed.place.notice == "It runs on the CPU: no driver."
    assert "KV cache: " in placed.place.plan
    quiet = place(installed, Gpus(lambda wanted, gpu: DeviceChoice(None, "It runs on the CPU: no NVIDIA GPU.")))
    assert quiet.place.note
    assert not quiet.place.notice, "without a GPU nobody expects one"


def test_a_card_that_is_too_small_is_refused_or_left_for_the_cpu(
    installed: InstalledModel, runner: type[FakeRunner]
) -> None:
    small = replace(CARD, free_bytes=GIB // 2)
    with pytest.raises(PoolTooSmallError, match=r"RTX 4090 has too little memory.*512 MiB of 24.0 GiB are free"):
        place(installed, gpus(small), device="cuda")
    placed = place(installed, gpus(small))
    assert placed.place.device == "cpu"
    assert placed.place.note.startswith(
        "It runs on the CPU: NVIDIA GeForce RTX 4090 has too little memory: one context"
    )
    assert 'device = "cpu"' not in placed.place.note
    assert placed.place.notice == placed.place.note
    assert not runner.made


def test_a_pool_that_cannot_be_had_shrinks(installed: InstalledModel, runner: type[FakeRunner]) -> None:
    runner.largest_pool = 5000
    placed = place(installed, gpus(), device="cuda", kv_bytes=None)
    assert 64 <= placed.num_blocks <= 5000
    assert f"{placed.num_blocks:,} blocks" in placed.place.plan
    runner.largest_pool = 63
    with pytest.raises(PoolTooSmallError, match="Another program took memory"):
        place(installed, gpus(), device="cuda")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "another program took memory of NVIDIA GeForce RTX 4090"),
        (RuntimeError("CUDA error: out of memory"), "another program took memory of NVIDIA GeForce RTX 4090"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "refuses the kernels"),
        (RuntimeError("Failed to find C compiler. Please specify"), "apt install gcc"),
        (RuntimeError("CUDA error: unspecified launch failure\nlong"), "The log tells it: CUDA error: unspecified"),
    ],
)
def test_what_fails_on_the_card_is_explained(
    installed: InstalledModel,
    runner: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    load = model_device.load_model
    is_first = [True]

    def fail_once(*args: Any, **options: Any) -> Any:
        if is_first.pop() if is_first else False:
            raise error
        return load(*args, **options)

    monkeypatch.setattr(model_device, "load_model", fail_once)
    placed = place(installed, gpus())
    assert placed.place.device == "cpu"
    assert said in placed.place.note
    assert "long" not in placed.place.note
    is_first.append(True)
    with pytest.raises((UserError, PoolTooSmallError, RuntimeError)) as refused:
        place(installed, gpus(), device="cuda")
    if not isinstance(refused.value, RuntimeError):
        assert said.lower() in str(refused.value).lower()


def test_a_load_that_nobody_wants_any_more_does_not_go_on_on_the_cpu(
    installed: InstalledModel, runner: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def abandon(*args: Any, **options: Any) -> Any:
        raise LoadAbandonedError

    monkeypatch.setattr(model_device, "load_model", abandon)
    with pytest.raises(LoadAbandonedError):
        place(installed, gpus())


def test_fp8_for_k_and_v_becomes_int8_on_the_cpu_and_is_told(installed: InstalledModel) -> None:
    placed = place(installed, Gpus(no_gpu), kv_dtype="fp8")
    assert placed.decoder.layout.kv_dtype == "int8"
    assert placed.place.note.endswith("K and V are kept in int8: fp8 needs a GPU.")


def test_beside_a_gpu_memory_is_kept_for_blocks_unless_it_is_set() -> None:
    share = min(machine_memory_bytes() // 4, 16 * GIB)
    assert abs(host_tier_bytes(Settings(), "cuda") - share) <= 1
    assert host_tier_bytes(Settings(), "cpu") == 0
    assert host_tier_bytes(Settings(kv_host_bytes=0), "cuda") == 0
    assert host_tier_bytes(Settings(kv_host_bytes=GIB), "cpu") == GIB
