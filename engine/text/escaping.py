"""Keeps what a person typed apart from what the template says, inside one rendered text.

Control-token text in content is written in private-use characters while the template runs, and read back afterwards.
Marks, private-use too, stand around contents, so that they are found again in the rendered text. Private-use
characters that a person typed are themselves escaped: nothing typed can be taken for an escape or a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from .word_trie import any_of

_FIRST = 0x10FF00
_ESCAPE, _END, _MARK, _BEGINS, _ENDS = map(chr, range(_FIRST, _FIRST + 5))
_DIGITS = "".join(map(chr, range(_FIRST + 16, _FIRST + 32)))
_RESERVED = f"[{chr(_FIRST)}-{_DIGITS[-1]}]"
_HAS_RESERVED = re.compile(_RESERVED)
_ESCAPED = re.compile(f"{_ESCAPE}([{_DIGITS}]+){_END}")
_MARKED = re.compile(f"{_MARK}([{_DIGITS}]+)([{_BEGINS}{_ENDS}])")
_HEX = "0123456789abcdef"
_TO_DIGITS, _FROM_DIGITS = str.maketrans(_HEX, _DIGITS), str.maketrans(_DIGITS, _HEX)


class Escaper:
    """Escapes texts so that none of the given control texts is left in them."""

    def __init__(self, control_texts: Iterable[str]):
        self._pattern = re.compile(f"{_RESERVED}|{any_of(control_texts)}")

    def escape(self, text: str) -> str:
        """Injective; `unescape` gives the text back. The first character of each control text is escaped."""
        pieces: list[str] = []
        position = 0
        match = self._pattern.search(text)
        while match:
            at = match.start()
            pieces += (text[position:at], _escaped(text[at]))
            position = at + 1
            # From the next character on: control texts may overlap.
            match = self._pattern.search(text, position)
        return "".join((*pieces, text[position:])) if pieces else text

    def escape_all(self, value: Any) -> Any:
        """Each string in a JSON-like value, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, dict):
            return {self.escape_all(key): self.escape_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_all(item) for item in value]
        return value


def unescape(text: str) -> str:
    if not _HAS_RESERVED.search(text):
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1].translate(_FROM_DIGITS), 16)), text)


def split_escaped(text: str, num_chars: int) -> tuple[str, str]:
    """Cuts an escaped text after `num_chars` of the characters that it stands for."""
    position = 0
    for match in _ESCAPED.finditer(text):
        num_plain = match.start() - position
        if num_chars <= num_plain:
            break
        num_chars -= num_plain + 1
        position = match.end()
    cut = position + num_chars
    return text[:cut], text[cut:]


def with_marks(text: str, index: int) -> str:
    """Marks inside the white space at the ends, so that a template that trims still does."""
    core = text.strip()
    start = text.index(core) if core else len(text)
    digits = f"{index:x}".translate(_TO_DIGITS)
    return f"{text[:start]}{_MARK}{digits}{_BEGINS}{core}{_MARK}{digits}{_ENDS}{text[start + len(core) :]}"


class Marks(NamedTuple):
    text: str
    """Without the marks."""
    starts: dict[int, int]
    """Index of a marked content to its first offset in the text; the last one where a template repeats it."""
    ends: dict[int, int]
    offsets: list[int]
    """Of all marks, ascending."""


def read_marks(marked: str) -> Marks:
    pieces: list[str] = []
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    offsets: list[int] = []
    position = length = 0
    for match in _MARKED.finditer(marked):
        pieces.append(marked[position : match.start()])
        length += len(pieces[-1])
        position = match.end()
        index = int(match[1].translate(_FROM_DIGITS), 16)
        (starts if match[2] == _BEGINS else ends)[index] = length
        offsets.append(length)
    pieces.append(marked[position:])
    return Marks("".join(pieces), starts, ends, offsets)


def _escaped(char: str) -> str:
    return f"{_ESCAPE}{ord(char):x}{_END}".translate(_TO_DIGITS)
