"""Tokenizers of each family: the default model's, and small ones trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from chatkv.app.hub.gguf_metadata import read_metadata
from chatkv.app.hub.gguf_tokenizer import convert_tokenizer
from chatkv.engine.text.tokenizer import Tokenizer

SPECIAL = (
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>", "[INST]", "[/INST]",
)  # fmt: skip
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "user assistant system tool The quick brown fox says hello world, don't you? USER: ASSISTANT: INST SYS 12345 67",
    "<|im_start|> <|im_end|> </s> <s> [INST] im_start im_end think tool_call <<SYS>> ### Instruction: ### Response:",
    "def f(x):\n    return x + 1\n\n\n        indented 日本語のテキスト 中文字符 émigré naïve façade 😀 👩‍👩‍👧 ünïcödé",
] * 20


def _added(first_id: int) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": first_id + index, "content": text, "special": text in SPECIAL, **flags}
        for index, text in enumerate((*SPECIAL, *VISIBLE))
    ]


def _byte_level(normalizer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    trained.train_from_iterator(CORPUS, trainer)
    spec = json.loads(trained.to_str())
    spec["normalizer"] = normalizer
    spec["added_tokens"] = _added(len(spec["model"]["vocab"]))
    return spec


def _sentencepiece() -> dict[str, Any]:
    """As Llama 2's: control tokens first, then the bytes, then pieces."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=[]))
    spec = json.loads(trained.to_str())
    added = _added(0)
    pieces = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    texts = [*(token["content"] for token in added), *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    spec["model"] |= {"vocab": {text: index for index, text in enumerate(texts)}, "unk_token": "<unk>"}
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
    spec["pre_tokenizer"] = None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    spec["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    spec["added_tokens"] = added
    return spec


def _sentencepiece_first() -> dict[str, Any]:
    """As newer conversions: the prefix space stands before the whole text only, and a post-processor adds BOS."""
    spec = _sentencepiece()
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return spec


def _gpt2(_: Any = None) -> dict[str, Any]:
    steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    return _byte_level(None, pre_tokenizers.Sequence(steps))


def _llama3() -> dict[str, Any]:
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated")
    spec = _byte_level(None, pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))
    spec["model"]["ignore_merges"] = True
    return spec


def _qwen2() -> dict[str, Any]:
    return {**_llama3(), "normalizer": {"type": "NFC"}}


KIND_TO_SPEC: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "sentencepiece": _sentencepiece,
    "sentencepiece-first": _sentencepiece_first,
}
KINDS = tuple(KIND_TO_SPEC)


class TokenizerFolder:
    """A native directory with one tokenizer, and the `tokenizers` library's own reading of it."""

    def __init__(self, path: Path):
        self.path = path
        self.tokenizer = Tokenizer.from_dir(path)
        self.oracle = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self.spec: dict[str, Any] = json.loads((path / "tokenizer.json").read_text())


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerFolder]:
    folders = {}
    for kind, make_spec in KIND_TO_SPEC.items():
        path = tmp_path_factory.mktemp(kind)
        (path / "tokenizer.json").write_text(json.dumps(make_spec()))
        ids = {
            token["content"]: token["id"] for token in json.loads((path / "tokenizer.json").read_text())["added_tokens"]
        }
        facts = {"bos_token_id": ids["<s>"], "eos_token_ids": [ids["</s>"], ids["<|im_end|>"]]}
        (path / "chatkv.json").write_text(json.dumps(facts))
        folders[kind] = TokenizerFolder(path)
    return folders


@pytest.fixture(scope="session")
def default_folder(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerFolder:
    """The default model's tokenizer and chat template."""
    path = tmp_path_factory.mktemp("default")
    converted = convert_tokenizer(read_metadata(default_gguf), default_gguf)
    assert converted.chat_template is not None
    (path / "tokenizer.json").write_text(json.dumps(converted.tokenizer_json))
    (path / "chat_template.jinja").write_text(converted.chat_template)
    facts = {"bos_token_id": converted.bos_token_id, "eos_token_ids": list(converted.eos_token_ids)}
    (path / "chatkv.json").write_text(json.dumps(facts))
    return TokenizerFolder(path)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tokenizer_folders: dict[str, TokenizerFolder]) -> TokenizerFolder:
    return tokenizer_folders[request.param]


@pytest.fixture
def tokenizer(folder: TokenizerFolder) -> Tokenizer:
    return folder.tokenizer
