"""A stream's text is the decoded answer cut before its first stop string, and nothing else is ever shown."""

from __future__ import annotations

import codecs
import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatkv.engine.text.detokenizer import TextStream, answer_ids
from chatkv.engine.text.stop_strings import StopMatcher
from chatkv.engine.text.tokenizer import Tokenizer

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(text: str, stop: list[str]) -> tuple[str, bool]:
    """Naive: the stop string that ends first, of those the longest."""
    ends = [(text.find(word) + len(word), -len(word)) for word in stop if word and word in text]
    return (text[: min(ends)[0] + min(ends)[1]], True) if ends else (text, False)


def draw_answer(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Any ids: texts with emoji and CJK cut in the middle, single bytes, control tokens."""
    text_ids = data.draw(
        st.lists(st.sampled_from(["hello", " wörld", "日本語", "👩‍👩‍👧", "🦊", "\n", "don't stop"]), max_size=5)
    )
    ids = [token_id for text in text_ids for token_id in tokenizer.encode_run(text, is_run_start=False)]
    for extra in data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=5)):
        ids.insert(data.draw(st.integers(0, len(ids))), extra)
    return ids


@relaxed
@given(data=st.data())
def test_a_stream_equals_the_decoded_answer_byte_for_byte(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """E1."""
    ids = draw_answer(data, tokenizer)
    stream = TextStream(tokenizer)
    deltas = [stream.push([token_id]).text for token_id in ids]
    assert "".join(deltas) + stream.finish() == tokenizer.decode(ids)


@relaxed
@given(data=st.data())
def test_text_stops_before_the_first_stop_string(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """E6: neither a leaked part nor a held rest."""
    ids = draw_answer(data, tokenizer)
    whole = tokenizer.decode(ids)
    parts = [whole[start : start + size] for start in range(len(whole)) for size in (1, 2, 5)]
    words = st.sampled_from([*parts, "stop", "o", "ll", "日", "zz"])
    stop = data.draw(st.lists(words, max_size=3))
    expected, is_stopped = cut(whole, stop)
    stream = TextStream(tokenizer, stop=stop)
    shown = ""
    for token_id in ids:
        delta = stream.push([token_id])
        shown += delta.text
        assert expected.startswith(shown)
        if delta.is_stopped:
            break
    assert shown + stream.finish() == expected
    pushed_at_once = TextStream(tokenizer, stop=stop)
    delta = pushed_at_once.push(ids)
    assert delta.text + pushed_at_once.finish() == expected
    if delta.is_stopped:
        assert is_stopped
        assert cut(tokenizer.decode(ids[: delta.num_tokens]), stop) == (expected, True)


def test_bytes_of_half_a_character_are_held(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_run("🦊", is_run_start=False)
    assert len(ids) > 1
    stream = TextStream(tokenizer, prompt_tail_ids=tokenizer.encode_run("a"))
    assert [stream.push([token_id]).text for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.push(ids[-1:]).text == "🦊"
    assert stream.finish() == ""


def test_an_answer_that_ends_within_a_character_ends_with_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_run("🦊", is_run_start=False)[:-1]
    stream = TextStream(tokenizer, prompt_tail_ids=tokenizer.encode_run("a"))
    assert stream.push(ids).text == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-first"])
def test_the_prefix_space_belongs_to_the_text_only_after_text(tokenizer_folders: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizer_folders[kind].tokenizer
    ids = tokenizer.encode_run(" hello world", is_run_start=False)
    after_control = TextStream(tokenizer, prompt_tail_ids=[tokenizer.special_ids["</s>"]])
    after_text = TextStream(tokenizer, prompt_tail_ids=tokenizer.encode_run("USER:"))
    resumed = TextStream(tokenizer, prompt_tail_ids=[tokenizer.special_ids["</s>"]], resume_text="I say")
    assert after_control.push(ids).text == "hello world"
    assert after_text.push(ids).text == " hello world"
    assert resumed.push(ids).text == " hello world"


def test_a_stop_string_may_begin_in_the_text_before_a_continuation(tokenizer: Tokenizer) -> None:
    tail = tokenizer.encode_run("x")
    ids = tokenizer.encode_run("ND more", is_run_start=False)
    stream = TextStream(tokenizer, tail, stop=("END", "zzz"), resume_text="the E")
    delta = stream.push(ids)
    assert (delta.text, delta.is_stopped) == ("", True)
    other = TextStream(tokenizer, tail, stop=("END!",), resume_text="the E")
    assert other.push(ids).text + other.finish() == "ND more"


def test_a_stop_string_within_the_text_before_does_not_end_a_continuation(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, tokenizer.encode_run("x"), stop=("END",), resume_text="END EN")
    assert stream.push(tokenizer.encode_run("x", is_run_start=False)).text == "x"
    assert not stream.push(tokenizer.encode_run("D", is_run_start=False)).is_stopped


def test_a_stopped_stream_says_nothing_more(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, tokenizer.encode_run("x"), stop=("ll",))
    assert stream.push(tokenizer.encode_run("hello", is_run_start=False)).text == "he"
    assert stream.push(tokenizer.encode_run("hello", is_run_start=False)).text == ""
    assert stream.finish() == ""


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.text("ab", max_size=60), st.randoms())
def test_what_is_held_is_the_longest_beginning_of_a_stop_string(
    stop: list[str], text: str, random: random.Random
) -> None:
    matcher = StopMatcher(stop)
    position = 0
    while position < len(text):
        size = random.randint(1, 5)
        match = matcher.push(text[position : position + size])
        if match:
            end = position + match[0]
            assert cut(text, stop) == (text[: end - match[1]], True)
            return
        position += size
        read = text[:position]
        suffixes = [length for word in stop for length in range(1, len(word)) if read.endswith(word[:length])]
        assert matcher.num_held == max(suffixes, default=0)
    assert not cut(text, stop)[1]


@pytest.mark.slow
def test_matching_takes_linear_time() -> None:
    """The classic trap: a stop string that almost matches everywhere."""

    def seconds(num_chars: int) -> float:
        matcher = StopMatcher(["a" * 1000 + "b", "a" * 999 + "c"])
        text = ("a" * 1500 + "d") * (num_chars // 1501)
        started = time.perf_counter()
        assert matcher.push(text) is None
        return time.perf_counter() - started

    short, long = min(seconds(30_000) for _ in range(3)), min(seconds(300_000) for _ in range(3))
    assert long < 40 * short


def longest_within(tokenizer: Tokenizer, ids: list[int], visible: str, *, is_text_start: bool) -> list[int]:
    """Naive: try every length. `is_text_start` reads the ids as a decoder that drops the first space does."""
    best: list[int] = []
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], is_text_start=is_text_start)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(tokenizer.token_bytes, ids[:length])))
        is_whole = not decoder.getstate()[0]
        if tokenizer.token_bytes(ids[length - 1]) and visible.startswith(text) and is_whole:
            best = ids[:length]
    return best


@relaxed
@given(data=st.data())
def test_kept_ids_are_the_longest_prefix_within_the_visible_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = draw_answer(data, tokenizer)
    whole = tokenizer.decode(ids, is_text_start=data.draw(st.booleans()))
    visible = whole[: data.draw(st.integers(0, len(whole)))]
    # An answer follows a prompt, so that its first space is shown; a client may have dropped it all the same.
    expected = longest_within(tokenizer, ids, visible, is_text_start=False)
    if not expected and tokenizer.has_prefix_space:
        expected = longest_within(tokenizer, ids, visible, is_text_start=True)
    assert list(answer_ids(tokenizer, ids, visible)) == expected


def test_kept_ids_leave_the_end_of_the_turn_to_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_run("hello world", is_run_start=False)
    end = tokenizer.special_ids["<|im_end|>"]
    assert answer_ids(tokenizer, [*ids, end], "hello world") == tuple(ids)
    assert answer_ids(tokenizer, [ids[0], end, *ids[1:]], "hello world") == (ids[0], end, *ids[1:])
    assert answer_ids(tokenizer, [end], "") == ()
