"""Text to ids and back: exact, and nothing typed becomes a control token."""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatkv.engine.errors import BrokenModelError, UnsupportedModelError
from chatkv.engine.text.tokenizer import Tokenizer
from chatkv.engine.text.word_trie import any_of

PIECES = (
    "hello", " world", "\n", "  ", "\t", "▁", "é", "e\u0301", "日本", "😀", "👩‍👩‍👧", "\u200d", "12345", "don't",
    "<|im_start|>", "<|im_end|>", "</s>", "<s>", "<unk>", "[INST]", "<think>", "<|im_", "end|>", "<", "|", "\u00a0",
    "<0x41>", "K",
)  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
)
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def expected_text(tokenizer: Tokenizer, text: str, kind_spec: dict[str, Any]) -> str:
    """What a round trip may change: NFC where the model asks for it, and SentencePiece's own space mark."""
    if (kind_spec["normalizer"] or {}).get("type") == "NFC":
        text = unicodedata.normalize("NFC", text)
    return text.replace("▁", " ") if tokenizer.has_prefix_space else text


@relaxed
@given(text=texts)
def test_text_survives_a_round_trip(folder: Any, text: str) -> None:
    tokenizer = folder.tokenizer
    expected = expected_text(tokenizer, text, folder.spec)
    ids = tokenizer.encode_run(text, is_text_start=True)
    is_prefixed = not (expected.startswith(" ") and folder.spec["normalizer"] is None)
    assert tokenizer.decode(ids, is_text_start=is_prefixed) == expected
    assert tokenizer.decode(tokenizer.encode_run(text, is_run_start=False), is_text_start=False) == expected


@relaxed
@given(text=texts)
def test_typed_text_is_never_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    assert not set(tokenizer.special_ids.values()) & set(tokenizer.encode_run(text))


@relaxed
@given(text=texts)
def test_written_out_control_tokens_are_read_as_the_library_reads_them(folder: Any, text: str) -> None:
    expected = folder.oracle.encode(text, add_special_tokens=False).ids
    assert folder.tokenizer.encode_with_special(text) == expected


@relaxed
@given(text=texts)
def test_the_bound_never_exceeds_the_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode_run(text, is_run_start=False))


@relaxed
@given(data=st.data())
def test_decoding_agrees_with_the_library_on_whole_characters(folder: Any, data: st.DataObject) -> None:
    text = data.draw(texts)
    ids = folder.tokenizer.encode_with_special(text)
    assert folder.tokenizer.decode(ids) == folder.oracle.decode(ids, skip_special_tokens=True)


def test_bytes_of_ids_are_exact(tokenizer: Tokenizer) -> None:
    text = "日本語 🦊 naïve"
    ids = tokenizer.encode_run(text, is_run_start=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert any(len(tokenizer.token_bytes(token_id)) == 1 for token_id in ids)


def test_hidden_tokens_are_no_text_and_visible_ones_are(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_with_special("<think>hello</think><|im_end|>")
    assert tokenizer.decode(ids, is_text_start=False).replace(" ", "") == "<think>hello</think>"
    assert tokenizer.token_bytes(tokenizer.special_ids["<|im_end|>"]) == b""
    assert tokenizer.token_text(tokenizer.special_ids["<|im_end|>"]) == "<|im_end|>"


def test_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, -1, 10**9]) == ""


def test_half_a_surrogate_pair_is_no_error(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_run("a\ud83db", is_run_start=False), is_text_start=False) == "a\ufffdb"


def test_a_merge_that_makes_a_control_token_is_not_used(tokenizer_folders: dict[str, Any], tmp_path: Path) -> None:
    spec = json.loads(json.dumps(tokenizer_folders["gpt2"].spec))
    vocab = spec["model"]["vocab"]
    spec["model"]["merges"] = [["<", "|"], ["<|", "x"], ["<|x", ">"]]
    for text in ("<|", "<|x", "<|x>"):
        vocab.setdefault(text, max(max(vocab.values()), spec["added_tokens"][-1]["id"]) + 1)
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": vocab["<|x>"], "content": "<|x>", "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert vocab["<|x>"] not in tokenizer.encode_run("<|x>")
    assert tokenizer.decode(tokenizer.encode_run("<|x>")) == "<|x>"


def test_tokens_may_swallow_white_space_beside_them(tokenizer_folders: dict[str, Any], tmp_path: Path) -> None:
    spec = json.loads(json.dumps(tokenizer_folders["gpt2"].spec))
    spec["added_tokens"][3] |= {"lstrip": True, "rstrip": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode_with_special("hello \n <|im_start|>  world")
    assert ids == [*tokenizer.encode_run("hello"), spec["added_tokens"][3]["id"], *tokenizer.encode_run("world")]


def test_a_long_text_is_known_to_be_long_without_tokenising_it(default_folder: Any) -> None:
    tokenizer = default_folder.tokenizer
    for text in ("The quick brown fox. " * 50_000, "a" * 1_000_000, "<" * 1_000_000, " " * 1_000_000, "日本" * 170_000):
        assert tokenizer.min_num_tokens(text) > 8192


def test_other_threads_run_while_a_long_text_is_tokenised(default_folder: Any) -> None:
    text = "The quick brown fox 日本 jumps. " * 30_000
    is_done = threading.Event()
    worker = threading.Thread(target=lambda: (default_folder.tokenizer.encode_run(text), is_done.set()))
    turns = 0
    worker.start()
    while not is_done.is_set():
        turns += 1
    worker.join()
    assert turns > 1000


def test_ids_are_those_that_the_model_declares(folder: Any) -> None:
    tokenizer = folder.tokenizer
    assert tokenizer.eos_ids == {tokenizer.special_ids["</s>"], tokenizer.special_ids["<|im_end|>"]}
    assert tokenizer.first_eos_id == tokenizer.special_ids["</s>"]
    assert tokenizer.bos_id == tokenizer.special_ids["<s>"]
    undeclared = Tokenizer(folder.path / "tokenizer.json")
    assert tokenizer.special_ids["<|im_end|>"] in undeclared.eos_ids


def test_the_content_hash_names_the_file(folder: Any, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((folder.path / "tokenizer.json").read_bytes())
    assert Tokenizer(copy).content_hash == folder.tokenizer.content_hash
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert Tokenizer(copy).content_hash != folder.tokenizer.content_hash


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE", "vocab": [], "merges": {}}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BrokenModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(UnsupportedModelError, match="Unigram"):
        Tokenizer.from_dir(tmp_path)


@given(st.sets(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab<|", max_size=12))
def test_the_longest_word_at_a_position_is_found(words: set[str], text: str) -> None:
    match = re.compile(any_of(words)).match(text)
    candidates = [word for word in words if text.startswith(word)]
    assert (match[0] if match else None) == (max(candidates, key=len) if candidates else None)
