"""A missed prefix is explained by the first text that differs."""

from __future__ import annotations

from chatkv.engine.request import Miss
from chatkv.engine.text.miss import explain_miss
from chatkv.engine.text.tokenizer import Tokenizer


def test_the_first_differing_text_is_named(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_with_special("<|im_start|>user hello<|im_end|> new text")
    cached = tokenizer.encode_with_special("<|im_start|>user hello</s> old")
    start = len(tokenizer.encode_with_special("<|im_start|>user"))
    reason = explain_miss(tokenizer, prompt, Miss(start, tuple(cached[start:]), tuple(prompt[start : start + 16])))
    assert prompt[reason.position] == tokenizer.special_ids["<|im_end|>"]
    assert reason.text_before.startswith("<|im_start|>")
    assert reason.text_before.endswith("hello")
    assert reason.text.startswith("<|im_end|>")
    assert reason.expected_text.startswith("</s>")
    assert str(reason.position) in str(reason)
    assert "instead of '</s>" in str(reason)


def test_an_end_of_the_cache_is_no_difference(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_run("hello world hello world")
    reason = explain_miss(tokenizer, prompt, Miss(2, (), tuple(prompt[2:])))
    assert (reason.position, reason.expected_text) == (2, "")
    assert "nothing cached after token 2" in str(reason)
    assert explain_miss(tokenizer, prompt, Miss(2, tuple(prompt[2:]), ())).position == len(prompt)
