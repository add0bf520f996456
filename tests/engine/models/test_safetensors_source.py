"""Hugging Face directories: whole or sharded, checked before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import BASE, random_tensors

from chatkv.engine.errors import BrokenModelError, UnsupportedModelError
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.source import open_source
from chatkv.kernels.reference import dequantise

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}


def write_directory(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shards: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_as_stored(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in random_tensors(ModelConfig.from_hf(LLAMA)).items()}
    write_directory(tmp_path, tensors, LLAMA, shards)
    source = open_source(tmp_path)
    loaded = dict(source.tensors())
    assert loaded.keys() == tensors.keys()
    for name, tensor in loaded.items():
        values = tensor if isinstance(tensor, torch.Tensor) else dequantise(tensor)
        assert torch.equal(values.float(), tensors[name].float()), name
    assert source.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_a_stored_copy_of_a_tied_head_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_directory(tmp_path, tensors, tied)
    assert "lm_head.weight" not in dict(open_source(tmp_path).tensors())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mixtral"}, "mixtral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_directory(tmp_path, random_tensors(ModelConfig.from_hf(LLAMA)), LLAMA | change)
    with pytest.raises(UnsupportedModelError, match=words):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "wrong kind"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"vocab_size": 500}, "shape"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    ],
)
def test_a_config_that_does_not_fit_is_called_broken(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_directory(tmp_path, random_tensors(ModelConfig.from_hf(LLAMA)), LLAMA | change)
    with pytest.raises(BrokenModelError, match=words):
        open_source(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    write_directory(tmp_path, random_tensors(ModelConfig.from_hf(LLAMA)), config)
    with pytest.raises(BrokenModelError, match="intermediate_size"):
        open_source(tmp_path)


def test_a_foreign_tensor_or_type_is_refused_by_name(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    write_directory(tmp_path, tensors | {"model.layers.0.adapter": torch.ones(3)}, LLAMA)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.adapter"):
        open_source(tmp_path)
    tensors["model.norm.weight"] = torch.ones(96, dtype=torch.int32)
    write_directory(tmp_path, tensors, LLAMA)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has type I32"):
        open_source(tmp_path)


def test_damage_is_found_before_reading(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    write_directory(tmp_path, tensors, LLAMA, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1000])
    with pytest.raises(BrokenModelError, match="00002-of-00002"):
        open_source(tmp_path)
    shard.unlink()
    with pytest.raises(BrokenModelError, match="00002-of-00002"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenModelError, match=r"config\.json"):
        open_source(tmp_path)


def test_an_index_cannot_point_outside_the_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, random_tensors(ModelConfig.from_hf(LLAMA)), LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(BrokenModelError, match="outside"):
        open_source(tmp_path)
