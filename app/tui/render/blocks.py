"""What one source line of Markdown is, seen alone: heading, fence, rule, list marker, quote, text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .palette import Glyphs

_HEADING = re.compile(r"(#{1,6})(?:[ ]+(.*?))?(?:[ ]+#+)?[ ]*$")
_FENCE = re.compile(r"(`{3,}|~{3,})[ ]*([^`]*)$")
_RULE = re.compile(r"(?:\*[ ]*){3,}$|(?:-[ ]*){3,}$|(?:_[ ]*){3,}$")
_MARKER = re.compile(r"([-*+]|\d{1,9}[.)])(?:([ ]+)|$)")
_TASK = re.compile(r"\[([ xX])\][ ]+")

MAX_DEPTH = 8
"""Deeper containers are read as text; the screen has no room for them."""


@dataclass(slots=True)
class Quote:
    """An open `>`."""


@dataclass(slots=True)
class ListItem:
    """An open list item; later lines belong to it when they are indented far enough."""

    marker_indent: int
    content_indent: int
    marker: str
    is_marker_pending: bool = True

    def holds(self, indent: int) -> bool:
        """More lenient than CommonMark: models indent by two under `1.` as well."""
        return indent >= min(self.content_indent, self.marker_indent + 2)


Container = Quote | ListItem


@dataclass(slots=True)
class Fence:
    character: str
    length: int
    indent: int
    language: str
    lines: list[str] = field(default_factory=list)

    def is_closed_by(self, line: str) -> bool:
        text = line.strip()
        return len(text) >= self.length and not text.strip(self.character) and _indent(line) < self.indent + 4


def heading(text: str) -> tuple[int, str] | None:
    match = _HEADING.match(text)
    return (len(match[1]), match[2] or "") if match else None


def is_rule(text: str) -> bool:
    return _RULE.match(text) is not None


def fence(text: str, indent: int) -> Fence | None:
    match = _FENCE.match(text)
    if match is None:
        return None
    info = match[2].split()
    language = info[0].strip("{}.").lower() if info else ""
    return Fence(match[1][0], len(match[1]), indent, language)


def list_item(text: str, indent: int, depth: int, glyphs: Glyphs) -> tuple[ListItem, str] | None:
    """The item that `text` opens and the rest of its line; `indent` is the column where `text` starts."""
    match = _MARKER.match(text)
    if match is None or is_rule(text):
        return None
    spaces = len(match[2] or " ")
    content = text[match.end() :]
    if spaces > 4:
        content, spaces = " " * (spaces - 1) + content, 1
    marker = match[1] if match[1][0].isdigit() else glyphs.bullets[min(depth, len(glyphs.bullets) - 1)]
    task = _TASK.match(content)
    if task:
        marker = glyphs.open if task[1] == " " else glyphs.done
        content = content[task.end() :]
    return ListItem(indent, indent + len(match[1]) + spaces, marker), content


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
