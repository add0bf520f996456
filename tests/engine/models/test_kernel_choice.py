"""Which kernels run a model, and what is said about it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import BASE, decoder_of, logits_of, runner_of, sequence, tiled_decoder_of

from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.names import tensor_shapes
from chatkv.kernels import KernelChoice, executor_for
from chatkv.kernels.cpu.native.build import NoCompilerError
from chatkv.kernels.cpu.native.digest import fixed_program
from chatkv.kernels.cpu.native.library import VARIANT_NAMES, native_library
from chatkv.kernels.program import Embed, Register
from chatkv.kernels.weights import FpWeight

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}


def test_native_kernels_name_their_instruction_set_and_threads() -> None:
    best = VARIANT_NAMES[native_library().variants[0]]
    assert tiled_decoder_of(LLAMA, "int4", KernelChoice(num_threads=1)).kernels == f"native {best}, 1 thread"
    assert tiled_decoder_of(LLAMA, "int4", KernelChoice(num_threads=3)).kernels == f"native {best}, 3 threads"


def test_what_does_not_suit_runs_on_torch_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder_of(LLAMA).kernels.startswith("torch (native kernels need weights of 4 or 8 bits")
    mixed = fixed_program()
    table = FpWeight(torch.zeros(mixed.vocab_size, mixed.hidden_size))
    mixed = replace(mixed, ops=[Embed(Register.HIDDEN, table), *mixed.ops[1:]])
    assert executor_for(KernelChoice(), mixed).description.endswith("throughout, and some of this model's are larger)")
    small_heads = tiled_decoder_of(LLAMA | {"head_dim": 8, "num_attention_heads": 4}, "int8")
    assert small_heads.kernels == "torch (native kernels need a head size that 16 divides, this model's is 8)"
    asked = tiled_decoder_of(LLAMA, "int8", KernelChoice(cpu_kernels="torch"))
    assert asked.kernels == 'torch (as cpu_kernels = "torch" asks)'

    def no_library() -> None:
        raise NoCompilerError("no C++ compiler found: install g++ or clang++")

    monkeypatch.setattr("chatkv.kernels.cpu.native.model.native_library", no_library)
    without = tiled_decoder_of(LLAMA, "int8")
    assert without.kernels == "torch (no C++ compiler found: install g++ or clang++)"
    assert without.layout == asked.layout
    (row,) = logits_of(runner_of(without, 1), sequence([5], 0, [0]))
    assert row.isfinite().all()


def test_without_vector_instructions_torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(variants=("scalar",))
    monkeypatch.setattr("chatkv.kernels.cpu.native.model.native_library", lambda: library)
    assert tiled_decoder_of(LLAMA, "int8").kernels.startswith("torch (native kernels need AVX2")


def test_weights_count_as_they_lie_in_memory() -> None:
    num_params = sum(math.prod(s) for s in tensor_shapes(ModelConfig.from_hf(LLAMA)).values() if len(s) == 2)
    assert decoder_of(LLAMA).weight_bytes == 4 * num_params
    # 16 bits of scale for 32 numbers, and a last tile that is not full.
    assert 1 < tiled_decoder_of(LLAMA, "int8").weight_bytes / (num_params * 34 / 32) < 1.02
    assert 1 < tiled_decoder_of(LLAMA, "int4").weight_bytes / (num_params * 18 / 32) < 1.02


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="tpu"):
        tiled_decoder_of(LLAMA, "int8", KernelChoice(device="tpu"))
