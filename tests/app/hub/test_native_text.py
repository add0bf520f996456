from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from chatkv.app.errors import UserError
from chatkv.app.hub.native_text import write_native_text
from tests.app.hub.makers import TEMPLATE, TINY_TOKENS, write_gguf

TEXTS = ["Hello, world!", " two  blanks", "日本語 😀", "a\n\tb"]


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_end|>")])
    return tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face directory, as far as text goes."""
    folder = tmp_path / "hf"
    folder.mkdir()
    trained().save(str(folder / "tokenizer.json"))
    write(folder / "config.json", {"model_type": "llama", "eos_token_id": 1})
    write(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    return folder


@pytest.fixture
def native(tmp_path: Path) -> Path:
    folder = tmp_path / "native"
    folder.mkdir()
    return folder


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), "utf-8")


def read(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def token_id(folder: Path, text: str) -> int:
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    assert found is not None
    return found


def test_a_gguf_yields_all_four_files(native: Path, tmp_path: Path) -> None:
    text = write_native_text(write_gguf(tmp_path / "t.gguf"), native)
    assert {file.name for file in native.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert text.has_own_template
    assert text.num_tokens == len(TINY_TOKENS)
    assert (native / "chat_template.jinja").read_text() == TEMPLATE
    assert read(native / "generation_config.json")["eos_token_id"] == list(text.eos_token_ids)
    assert read(native / "tokenizer_config.json")["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize("eos", [7, [7, 8]])
def test_end_tokens_of_a_directory_come_from_all_that_names_them(source: Path, native: Path, eos: Any) -> None:
    write(source / "generation_config.json", {"eos_token_id": eos})
    text = write_native_text(source, native)
    expected = (*([eos] if isinstance(eos, int) else eos), 1, token_id(source, "</s>"), token_id(source, "<|im_end|>"))
    assert text.eos_token_ids == expected
    assert read(native / "generation_config.json")["eos_token_id"] == list(expected)
    assert text.bos_token_id == token_id(source, "<s>")


@pytest.mark.parametrize("form", ["jinja", "json", "config", "named"])
def test_the_template_is_found_in_each_layout(source: Path, native: Path, form: str) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    if form == "jinja":
        (source / "chat_template.jinja").write_text(TEMPLATE)
        write(source / "tokenizer_config.json", {"chat_template": "the older one"})
    elif form == "json":
        write(source / "chat_template.json", {"chat_template": TEMPLATE})
    else:
        write(source / "tokenizer_config.json", {"chat_template": TEMPLATE if form == "config" else named})
    assert write_native_text(source, native).has_own_template
    assert (native / "chat_template.jinja").read_text() == TEMPLATE


def test_a_model_without_a_template_gets_the_plain_one(source: Path, native: Path) -> None:
    assert not write_native_text(source, native).has_own_template
    template = ImmutableSandboxedEnvironment().from_string((native / "chat_template.jinja").read_text())
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = template.render(messages=turns, add_generation_prompt=True)
    assert prompt == "### System:\nS\n\n### User:\nU\n\n### Assistant:\n"
    answered = [*turns, {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}]
    assert template.render(messages=answered, add_generation_prompt=False).startswith(prompt + "A\n\n")


def test_a_slow_tokenizer_is_converted_once(source: Path, native: Path) -> None:
    original = trained()
    spec = json.loads(original.to_str())["model"]
    (source / "tokenizer.json").unlink()
    write(source / "vocab.json", spec["vocab"])
    merges = "\n".join(["#version: 0.2", *(" ".join(merge) for merge in spec["merges"])])
    (source / "merges.txt").write_text(merges + "\n", "utf-8")
    write(source / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"})
    write_native_text(source, native)
    converted = Tokenizer.from_file(str(native / "tokenizer.json"))
    for text in TEXTS:
        assert converted.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{", "is damaged"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("generation_config.json", "[]", "should hold a JSON object"),
    ],
)
def test_damaged_files_are_named(source: Path, native: Path, name: str, content: str, says: str) -> None:
    (source / name).write_text(content)
    with pytest.raises(UserError, match=says) as failure:
        write_native_text(source, native)
    assert name in str(failure.value)


def test_a_directory_without_a_tokenizer_is_refused(source: Path, native: Path) -> None:
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        write_native_text(source, native)


def test_recommended_sampling_is_kept_and_the_catalogue_wins(source: Path, native: Path) -> None:
    write(source / "generation_config.json", {"eos_token_id": 7, "temperature": 0.6, "top_k": 20})
    write_native_text(source, native, {"temperature": 0.7})
    written = read(native / "generation_config.json")
    assert (written["temperature"], written["top_k"]) == (0.7, 20)
