"""The Jinja environment that chat templates run in. A template comes with a model from the net: it reads what it is
given, changes nothing, and cannot run or grow without end."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 500_000
"""Loop turns and macro calls of one render; a chat of 10,000 messages takes some 50,000."""
MAX_SECONDS = 10.0
MAX_CHARS = 64 * 1024 * 1024
"""Longest text that a template may build."""
_MAX_ITEMS = 1_000_000
_MAX_EXPONENT = 64
_MAX_WIDTH = 1000
_WIDTH = re.compile(r"\d{4,}|\*")
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_STEP, _BOUNDED = "__step__", "__bounded__"


class RefusedByTemplateError(Exception):
    """The template called `raise_exception`."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Set up as `transformers` does it. What goes past a bound raises jinja2's SecurityError."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters |= {name: _with_narrow_numbers(self.filters[name]) for name in ("center", "indent", "wordwrap")}
        self.filters |= {"tojson": canonical_json, "join": _join, "replace": _replace, _BOUNDED: _bounded}
        self.filters.pop("format")  # The operator % does the same under a check.
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = Parser(self, source, name, filename).parse()
        _count_steps(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= MAX_CHARS and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("it raises a number to too high a power")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * times > _limit(sequence):
                    raise SecurityError("it repeats a text too often")
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise SecurityError("it pads a text too far")
        return _bounded(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _PADDING_METHODS) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja asks here, not above, before a template gets at `str.format`."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if isinstance(owner, str) and name in ("format", "format_map") and ":" in owner:
            raise SecurityError("it formats a text with a width")
        return super().wrap_str_format(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            return _join(args[0], owner)
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return _replace(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)


def step_counter() -> dict[str, Callable[[], str]]:
    """A variable for one render: the template calls it at each loop turn and macro call."""
    num_steps = 0
    deadline = time.monotonic() + MAX_SECONDS

    def step() -> str:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_STEPS or (num_steps % 64 == 0 and time.monotonic() > deadline):
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps or {MAX_SECONDS:.0f} seconds")
        return ""

    return {_STEP: step}


def canonical_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Keys in the order they came in: the same request gives the same bytes in every process."""
    if isinstance(indent, int) and indent > 16:
        raise SecurityError("it indents JSON too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise RefusedByTemplateError(str(message))


def _limit(sequence: Any) -> int:
    return MAX_CHARS if isinstance(sequence, str) else _MAX_ITEMS


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > _limit(value):
        raise SecurityError("it builds too long a text")
    return value


def _join(value: Any, d: str = "", attribute: str | None = None) -> str:
    items = value if attribute is None else [item[attribute] for item in value]
    parts, num_chars = [], 0
    for item in items:
        parts.append(str(item))
        num_chars += len(parts[-1]) + len(d)
        if num_chars > MAX_CHARS:
            raise SecurityError("it builds too long a text")
    return str(d).join(parts)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    num_found = text.count(old) if old else len(text) + 1
    if len(text) + num_found * len(new) > MAX_CHARS:
        raise SecurityError("it builds too long a text")
    return text.replace(old, new, -1 if count is None else count)


def _with_narrow_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # Keeps the mark that tells Jinja to pass its environment.
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(number, int) and number > _MAX_WIDTH for number in (*args, *kwargs.values())):
            raise SecurityError("it pads a text too far")
        return function(*args, **kwargs)

    return checked


def _count_steps(template: nodes.Template) -> None:
    """Puts a call of the counter first in each loop and macro, and a size check on each `~`."""
    for repeated in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        assert isinstance(repeated, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        repeated.body.insert(0, nodes.Output([call]))
    for parent in list(template.find_all(nodes.Node)):
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _checked(value))
            elif isinstance(value, list):
                setattr(parent, name, [_checked(item) if isinstance(item, nodes.Concat) else item for item in value])


def _checked(concat: nodes.Concat) -> nodes.Filter:
    return nodes.Filter(concat, _BOUNDED, [], [], None, None)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
