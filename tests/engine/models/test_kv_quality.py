"""int8 KV says nearly what fp32 KV says; with its scales mixed up it does not, so the bounds mean something."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import BASE, decoder_of, random_ids, runner_of

from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model, write_weights
from chatkv.engine.models.source import open_source
from chatkv.kernels import KernelChoice
from tests.kv_compare import Quality, compare, mix_scales_of_positions, swap_scales_of_heads

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
QWEN = BASE | {"architectures": ["Qwen2ForCausalLM"]}


def assert_good(quality: Quality, max_divergence: float, min_agreement: float) -> None:
    assert quality.divergence.isfinite().all(), "not finite"
    assert quality.divergence.mean() < max_divergence, "diverges"
    assert quality.agreement > min_agreement, "disagrees"


@pytest.mark.parametrize("hf_config", [LLAMA, QWEN])
def test_a_small_model(hf_config: dict[str, object]) -> None:
    plain, int8 = (runner_of(decoder_of(hf_config, kv_dtype=kv_dtype), 30) for kv_dtype in ("fp32", "int8"))
    ids = random_ids(400, 211, seed=8)
    assert_good(compare(plain, int8, ids), 2e-3, 0.94)
    for control in (swap_scales_of_heads, mix_scales_of_positions):
        with pytest.raises(AssertionError, match="diverges"):
            assert_good(compare(plain, int8, ids, control), 2e-3, 0.94)


@pytest.fixture(scope="module")
def folder(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    write_weights(open_source(default_gguf), folder)
    return folder


@pytest.mark.slow
def test_the_default_model(folder: Path) -> None:
    def model(kv_dtype: str) -> Decoder:
        return load_model(folder, KernelChoice(cpu_kernels="torch"), kv_dtype=kv_dtype)

    plain, int8 = (runner_of(model(kv_dtype), 50) for kv_dtype in ("fp32", "int8"))
    ids = random_ids(600, 49152, seed=1)
    assert_good(compare(plain, int8, ids), 5e-3, 0.95)
    for control in (swap_scales_of_heads, mix_scales_of_positions):
        with pytest.raises(AssertionError, match="diverges"):
            assert_good(compare(plain, int8, ids[:256], control), 5e-3, 0.95)
