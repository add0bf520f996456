"""The wire of chat completions. Names E1 .. E14 are cases of real servers and clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from .support import FakeModels, Running, running_service, until

TEXTS = ["héllo wörld", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🇩🇪 flag", "a\u2028b\u2029c", "tab\tand\r\nlines"]


@pytest.mark.parametrize("text", TEXTS)
async def test_e1_stream_equals_the_whole_answer_byte_for_byte(running: Running, text: str) -> None:
    whole = (await running.complete(f"say {text}")).json()["choices"][0]["message"]["content"]
    chunks = await running.chunks(f"say {text}")
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == whole == text
    assert "\ufffd" not in streamed


async def test_e5_usage_comes_only_when_asked_for_and_last(running: Running) -> None:
    unasked = await running.chunks("say hi")
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in unasked)
    asked = await running.chunks("say hi", stream_options={"include_usage": True})
    assert [chunk for chunk in asked if "usage" in chunk] == asked[-1:]
    assert asked[-1]["choices"] == []
    usage = asked[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    ignored = await running.complete("say hi", stream_options={"include_usage": True})
    assert ignored.status_code == 200


async def test_role_comes_once_and_first_and_finish_reason_once_and_last(running: Running) -> None:
    chunks = await running.chunks("say hi")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_e6_held_back_text_makes_no_empty_chunks(running: Running) -> None:
    chunks = await running.chunks("say 日本")
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]]
    assert contents == ["日", "本"]


async def test_events_are_compact_lines_with_one_space(running: Running) -> None:
    answer = await running.complete("say a: b", stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in answer.headers
    assert b"\r" not in answer.content
    for block in answer.content.split(b"\n\n")[:-1]:
        assert block.startswith(b"data: ")
        assert block.count(b"\n") == 0
    first = answer.content.split(b"\n\n")[0].removeprefix(b"data: ")
    assert first == json.dumps(json.loads(first), separators=(",", ":"), ensure_ascii=False).encode()


async def test_n_choices_are_tagged_by_index(running: Running) -> None:
    chunks = await running.chunks("say hi", n=3, stream_options={"include_usage": True})
    assert len([chunk for chunk in chunks if "usage" in chunk]) == 1
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "hi"
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
    whole = (await running.complete("say hi", n=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 6


async def test_e10_max_tokens_in_all_its_names(running: Running) -> None:
    for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}, {"n_predict": 2}):
        answer = (await running.complete("say hello", **fields)).json()
        assert answer["choices"][0]["message"]["content"] == "he"
        assert answer["choices"][0]["finish_reason"] == "length"
    for fields in ({}, {"max_tokens": None}, {"max_tokens": -1}):
        assert (await running.complete("say hello", **fields)).json()["choices"][0]["finish_reason"] == "stop"


async def test_logprobs(running: Running) -> None:
    answer = (await running.complete("say hi", logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "i"]
    assert content[0]["bytes"] == [104]
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2
    chunks = await running.chunks("say 日", logprobs=True)
    entries = [c["choices"][0]["logprobs"] for c in chunks]
    assert sum(len(entry["content"]) for entry in entries if entry) == 3
    assert (await running.complete("say hi")).json()["choices"][0]["logprobs"] is None


async def test_what_was_reused_is_told_on_request_only(running: Running) -> None:
    assert "chatkv" not in (await running.complete("say hi")).json()
    told = (await running.complete("say hi", chatkv=True)).json()["chatkv"]
    assert told == {"cached_by_tier": {"device": 7}, "load": None, "miss": None}
    assert (await running.chunks("say hi", chatkv=True))[-1]["chatkv"] == told
    body = {"messages": [{"role": "user", "content": "say hi"}]}
    answer = await running.unix.post("/v1/chat/completions", json=body, headers={"x-chatkv-debug": "1"})
    assert answer.json()["chatkv"] == told


async def test_nulls_are_absent_and_unknown_fields_are_ignored(running: Running) -> None:
    fields: dict[str, Any] = dict.fromkeys(
        ("model", "temperature", "top_p", "stop", "n", "seed", "stream", "stream_options", "logit_bias", "tools",
         "response_format", "max_tokens", "logprobs", "top_logprobs", "tool_choice", "user")
    )  # fmt: skip
    answer = await running.complete("say hi", **fields, an_unknown_field={"x": 1}, store=True, metadata={})
    assert answer.status_code == 200, answer.text
    assert "tool_calls" not in answer.json()["choices"][0]["message"]


async def test_a_stop_string_as_long_as_a_book_is_refused(running: Running) -> None:
    """Its automaton would be built between two steps of the engine, and take gigabytes."""
    refused = await running.complete("say hi", stop=["x", "y" * 100_000])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty"])
async def test_a_number_too_large_for_a_float_is_refused_by_name(running: Running, name: str) -> None:
    refused = await running.complete("say hi", **{name: 10**400})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name


async def test_sampling_reaches_the_engine(running: Running) -> None:
    await running.complete(
        "say hi", temperature=0, top_k=5, min_p=0.1, repeat_penalty=1.2, presence_penalty=0.5, seed=42, stop=["a", ""],
        logit_bias={"300": -100, "301": 5}, ignore_eos=True, min_tokens=1,
    )  # fmt: skip
    sampling = running.engine.requests[-1].sampling
    assert sampling.is_greedy
    assert sampling.top_k == 5
    assert sampling.repetition_penalty == 1.2
    assert sampling.stop == ("a",)
    assert sampling.seed == 42
    assert sampling.logit_bias == {300: -100.0, 301: 5.0}
    assert sampling.ignore_eos
    assert sampling.min_tokens == 1
    await running.complete("say hi")
    await running.complete("say hi")
    assert running.engine.requests[-1].sampling.seed != running.engine.requests[-2].sampling.seed


async def test_e8_messages_in_all_their_shapes(running: Running) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "index": 0, "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "result"},
        {"role": "user", "content": "say yes", "extra": 1},
    ]
    answer = await running.unix.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "yes"


async def test_mid_stream_failure_is_an_error_event_without_a_finish_reason(running: Running) -> None:
    chunks = await running.chunks("fail")
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "purpose" in chunks[-1]["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    whole = await running.complete("fail")
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "generation_failed"


async def test_e14_headers_come_at_once_and_comments_while_nothing_happens(home: Path) -> None:
    async with running_service(FakeModels(), keep_alive_s=0.02) as running:
        await running.ready()
        running.engine.step_gate.clear()
        body = {"messages": [{"role": "user", "content": "say hi"}], "stream": True}
        async with running.unix.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            seen = b""
            async for part in answer.aiter_raw():
                seen += part
                if seen.count(b": keep-alive\n") == 2:
                    running.engine.step_gate.set()
                if seen.endswith(b"data: [DONE]\n\n"):
                    break
        for line in seen.split(b"\n"):
            if line.startswith(b":"):
                assert line == b": keep-alive"
            else:
                assert line == b"" or line.startswith(b"data: ")


async def test_the_answers_of_stateless_clients_are_remembered(running: Running) -> None:
    await running.complete("say hello")
    text = running.service.models.loaded.text  # type: ignore[union-attr]
    await until(lambda: "hello" in text.remembered)  # type: ignore[attr-defined]


async def test_other_chats_go_on_while_a_large_body_is_read(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
    large = asyncio.create_task(running.unix.post("/v1/chat/completions", json=body))
    small = await running.complete("say hi")
    assert small.status_code == 200
    refused = await large
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] >= 1_000_000
    assert error["n_ctx"] == 4096
    assert "maximum context length" in error["message"]
    assert len(running.engine.requests) == 1
