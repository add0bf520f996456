"""GGUF files give the exact numbers they hold, under Hugging Face names; everything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from gguf_files import dequantised, write_gguf
from tiny import BASE, decoder_of, logits_of, random_ids, random_tensors, runner_of, sequence
from torch import Tensor

from chatkv.engine.errors import BrokenModelError, UnsupportedModelError
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.rope import RopeConfig
from chatkv.engine.models.source import open_source
from chatkv.kernels.reference import dequantise

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "smollm3": BASE | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "tie_word_embeddings": True},
}


def plain(tensor: object) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else dequantise(tensor)  # type: ignore[arg-type]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.int32), right.view(torch.int32))


def written(tmp_path: Path, arch: str = "llama", type_name: str = "F32", **options: Any) -> Path:
    file = tmp_path / "model.gguf"
    config = ARCHITECTURES[arch]
    write_gguf(file, arch, config, random_tensors(ModelConfig.from_hf(config)), type_name, **options)
    return file


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_numbers_are_kept_bit_for_bit(tmp_path: Path, type_name: str) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    source = open_source(written(tmp_path, type_name=type_name))
    loaded = dict(source.tensors())
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = dequantised(tensor, type_name) if tensor.dim() == 2 else tensor
        assert same_bits(plain(loaded[name]), expected), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_file_computes_what_its_origin_computes(tmp_path: Path, arch: str) -> None:
    config = ARCHITECTURES[arch]
    source = open_source(written(tmp_path, arch))
    assert source.model_config.architecture == config["architectures"][0]
    loaded = {name: plain(tensor) for name, tensor in source.tensors()}
    ids = sequence(random_ids(40, 211), 0, range(3))
    (expected,) = logits_of(runner_of(decoder_of(config)), ids)
    (found,) = logits_of(runner_of(decoder_of(source.hf_config, loaded)), ids)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_rope_factors_become_part_of_the_config(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 1.0, 2.5, 4.0, 8.0, 8.0, 8.0, 8.0])
    source = open_source(written(tmp_path, rope_factors=factors))
    frequencies = source.model_config.rope.inverse_frequencies(16)
    assert torch.equal(frequencies, RopeConfig().inverse_frequencies(16) / factors)


def test_the_default_model_is_read_exactly(default_gguf: Path) -> None:
    source = open_source(default_gguf)
    raw = {tensor.name: tensor for tensor in GGUFReader(default_gguf).tensors}
    checked = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
        "model.layers.7.self_attn.v_proj.weight": "blk.7.attn_v.weight",
    }
    for name, tensor in source.tensors():
        if name in checked:
            origin = raw[checked[name]]
            expected = np.ascontiguousarray(dequantize(origin.data, origin.tensor_type), dtype=np.float32)
            assert same_bits(plain(tensor), torch.from_numpy(expected)), name
    assert source.total_bytes == 96_576_768


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="gemma3"):
        open_source(file)


def test_unknown_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    file = written(tmp_path, type_name="Q8_0")
    data = bytearray(file.read_bytes())
    name = b"blk.1.ffn_up.weight"
    # After the name: number of dimensions (u32), two dimensions (u64), type (u32). 12 is Q4_K, whose blocks are
    # of 256: rows of 96 do not hold them, so a supported-looking one of the same shape is used: 6 is Q5_0.
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = (6).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.ffn_up\.weight has type Q5_0"):
        open_source(file)


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    config = LLAMA | {"attention_bias": True}
    tensors = random_tensors(ModelConfig.from_hf(config))
    del tensors["model.layers.0.self_attn.q_proj.bias"]
    write_gguf(file, "llama", LLAMA, tensors)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_k\.bias"):
        open_source(file)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    del tensors["model.layers.2.mlp.up_proj.weight"]
    write_gguf(tmp_path / "model.gguf", "llama", LLAMA, tensors)
    with pytest.raises(BrokenModelError, match=r"blk\.2\.ffn_up\.weight"):
        open_source(tmp_path / "model.gguf")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("inf")
    write_gguf(tmp_path / "model.gguf", "llama", LLAMA, tensors)
    with pytest.raises(BrokenModelError, match=r"blk\.1\.ffn_down\.weight"):
        list(open_source(tmp_path / "model.gguf").tensors())


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.3, 0.99])
def test_truncated_file_is_called_damaged(tmp_path: Path, kept: float) -> None:
    file = written(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(BrokenModelError, match=r"model\.gguf"):
        open_source(file)


@pytest.mark.parametrize("seed", range(25))
def test_corrupt_header_never_escapes_as_another_error(tmp_path: Path, seed: int) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    generator = np.random.default_rng(seed)
    for at in generator.integers(0, 4000, size=6):
        data[at] = generator.integers(256)
    file.write_bytes(data)
    try:
        for _ in open_source(file).tensors():
            pass
    except (BrokenModelError, UnsupportedModelError) as error:
        assert len(str(error)) > 20  # noqa: PT017


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"weights\.bin"):
        open_source(tmp_path / "weights.bin")
    with pytest.raises(BrokenModelError, match="does not exist"):
        open_source(tmp_path / "none.gguf")
    (tmp_path / "page.gguf").write_text("<html>not found</html>" * 10)
    with pytest.raises(BrokenModelError, match="not a GGUF file"):
        open_source(tmp_path / "page.gguf")
