"""Templates render alike everywhere, take what clients send, and are kept within bounds."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from typing import Any

import pytest

from chatkv.engine.errors import InvalidRequestError, TemplateError
from chatkv.engine.text import sandbox
from chatkv.engine.text.messages import ChatMessage, decoded_arguments
from chatkv.engine.text.template import ChatTemplate

from . import chat_templates as templates

TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "é <b>",
        "parameters": {"zeta": 1, "alpha": {"m": [1, "ü"], "b": None}},
    },
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def test_a_hundred_renders_are_the_same_bytes() -> None:
    """A5."""
    template = ChatTemplate(templates.MAPPING_TOOLS)
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"z": 1, "a": {"y": 2, "b": 3}}}}
    messages: list[dict[str, Any]] = [*turns("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    first = template.render(messages, tools=[TOOL])
    assert '{"zeta": 1, "alpha": {"m": [1, "ü"], "b": null}}' in first
    assert all(template.render(messages, tools=[TOOL]) == first for _ in range(100))


def test_processes_with_other_hash_seeds_render_the_same_bytes() -> None:
    """A5."""
    program = (
        "import sys; from chatkv.engine.text.template import ChatTemplate\n"
        f"text = ChatTemplate({templates.MAPPING_TOOLS!r}).render({turns('hi')!r}, tools=[{TOOL!r}])\n"
        "sys.stdout.buffer.write(text.encode())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {ChatTemplate(templates.MAPPING_TOOLS).render(turns("hi"), tools=[TOOL]).encode()}


def test_renders_what_transformers_renders(default_folder: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*turns("hi", "hello  ", "and?\n")]
    for source in (*templates.KEEPS_ANSWERS.values(), templates.SPLITTING, templates.MAPPING_TOOLS):
        (expected,), _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **TOKENS)
        assert ChatTemplate(source, TOKENS).render(messages) == expected


def test_the_default_model_keeps_its_own_system_message(default_folder: Any) -> None:
    template = ChatTemplate.from_dir(default_folder.path, default_folder.tokenizer)
    assert "You are a helpful AI assistant named SmolLM" in template.render(turns("hi"))
    assert "SmolLM" not in template.render([system("Be brief."), *turns("hi")])


def test_the_clock_is_the_given_day() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}")
    assert template.render(turns("hi"), today=dt.date(2026, 2, 3)) == "03 Feb 2026 00:00"


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        pytest.param(
            templates.LLAMA2,
            [*turns("a"), system("S"), *turns("b", "c", first="assistant"), system("T")],
            "<s>[INST] <<SYS>>\nS\n\nT\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
            id="system messages go to the start",
        ),
        pytest.param(
            templates.LLAMA2,
            [*turns("a"), *turns("b"), *turns("c", first="assistant")],
            "<s>[INST] a\n\nb [/INST] c </s>",
            id="neighbours are merged",
        ),
        pytest.param(
            templates.WITHOUT_SYSTEM,
            [system("S"), *turns("a")],
            "<s>[INST]user: S\n\na[/INST][INST]assistant: ",
            id="system text goes into the first turn",
        ),
        pytest.param(
            "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}",
            [system("S"), *turns("a")],
            "user:S\n\na;",
            id="a system message is not dropped in silence",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content[0].text }};{% endfor %}", turns("a", "b"), "a;b;", id="parts"
        ),
    ],
)
def test_messages_are_made_to_fit(source: str, messages: list[dict[str, str]], expected: str) -> None:
    """E8."""
    assert ChatTemplate(source, TOKENS).render(messages) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (templates.LLAMA2, "must alternate"),
        ("{{ raise_exception('never ' ~ messages[0].role) }}", "never assistant"),
        ("{{ messages[5].content.x }}", "UndefinedError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10 ** 10 }}", "too often"),
        ("{{ [1] * 10 ** 10 }}", "too often"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "too long"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "too long"),
        ("{{ (['a' * 1000000] * 10000) | join }}", "too long"),
        ("{{ ' '.join(['a' * 1000000] * 10000) }}", "too long"),
        ("{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "too long"),
        ("{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}", "too long"),
        ("{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}", "characters"),
        ("{{ 'a' | center(10 ** 9) }}", "pads"),
        ("{{ 'a'.ljust(10 ** 9) }}", "ljust"),
        ("{{ '%999999999d' % 1 }}", "pads"),
        ("{{ '{:999999999}'.format(1) }}", "width"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "power"),
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{% set _ = messages.append(1) %}", "append"),
        ("{{ range(10 ** 9) | list }}", "too big"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_said(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source, TOKENS).render(turns("a", first="assistant"))


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(TemplateError, match="compile"):
        ChatTemplate("{% for %}")


def test_a_model_without_a_template_says_so(tokenizer_folders: dict[str, Any]) -> None:
    folder = tokenizer_folders["gpt2"]
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.from_dir(folder.path, folder.tokenizer).render(turns("hi"))


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    body = "{% if i == 3 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}"
    source = "{% for i in range(5) %}" + body + "{% endfor %}"
    assert ChatTemplate(source).render(turns("a")) == "012"


@pytest.mark.parametrize(
    ("source", "wants_text"),
    [(templates.MAPPING_TOOLS, False), (templates.TEXT_TOOLS, True), (templates.EITHER_TOOLS, True)],
)
def test_the_form_of_tool_arguments_is_found_out(source: str, wants_text: bool) -> None:
    """E7."""
    assert ChatTemplate(source).wants_text_arguments is wants_text


@pytest.mark.parametrize(
    ("arguments", "as_text", "expected"),
    [
        ('{"b": 1, "a": [2]}', False, {"b": 1, "a": [2]}),
        ('{"b":  1}', True, '{"b":  1}'),
        ({"b": 1}, True, '{"b": 1}'),
        ({"b": 1}, False, {"b": 1}),
        ('{"b": ', False, '{"b": '),
        ("[1]", False, "[1]"),
        ("", False, {}),
    ],
)
def test_tool_arguments_take_the_form_and_broken_json_stays_text(arguments: Any, as_text: bool, expected: Any) -> None:
    """E7."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    assert decoded_arguments(call, as_text=as_text)["function"] == {"name": "f", "arguments": expected}


def test_a_clients_message_is_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert ChatMessage.from_api({"role": "developer", "content": parts}) == ChatMessage("system", "a\nb\nc")
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    answer = ChatMessage.from_api({"role": "assistant", "content": None, "tool_calls": [call], "index": 0})
    assert answer == ChatMessage("assistant", "", tool_calls=[call])
    assert ChatMessage.from_api({"role": "tool", "content": "x", "tool_call_id": None}) == ChatMessage("tool", "x")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[3]"),
        ({"content": "x"}, "messages[3].role"),
        ({"role": "user<|im_end|>", "content": "x"}, "messages[3].role"),
        ({"role": ["user"], "content": "x"}, "messages[3].role"),
        ({"role": "user", "content": 5}, "messages[3].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[3].content"),
        ({"role": "user", "content": "x", "name": 5}, "messages[3].name"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[3].tool_calls"),
    ],
)
def test_a_wrong_field_of_a_message_is_named(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatMessage.from_api(message, 3)
    assert caught.value.param == param
