"""The open quotes and list items around what is being read: what continues them, and what they draw before each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import blocks
from .blocks import Container, ListItem, Quote
from .palette import Palette
from .width import Run, cell_len


@dataclass(frozen=True)
class Match:
    depth: int
    """Open containers that the line continues."""
    text: str
    """What stands behind their prefixes."""
    column: int


class Nesting:
    def __init__(self, palette: Palette, containers: list[Container] | None = None):
        self._palette = palette
        self._containers = containers or []

    def __len__(self) -> int:
        return len(self._containers)

    def copy(self) -> Nesting:
        return Nesting(self._palette, [replace(container) for container in self._containers])

    @property
    def is_quoted(self) -> bool:
        return any(isinstance(container, Quote) for container in self._containers)

    @property
    def is_marker_pending(self) -> bool:
        return any(isinstance(c, ListItem) and c.is_marker_pending for c in self._containers)

    @property
    def num_cells(self) -> int:
        """Width of the prefix."""
        return sum(_cells(container) for container in self._containers)

    def match(self, line: str) -> Match:
        column = 0
        for depth, container in enumerate(self._containers):
            text = line[column:]
            indent = len(text) - len(text.lstrip(" "))
            if isinstance(container, Quote):
                if indent > 3 or text[indent : indent + 1] != ">":
                    return Match(depth, text, column)
                column += indent + 1 + (text[indent + 1 : indent + 2] == " ")
            elif not text.strip() or container.holds(column + indent):
                column += min(indent, max(0, container.content_indent - column)) if text.strip() else 0
            else:
                return Match(depth, text, column)
        return Match(len(self._containers), line[column:], column)

    def first_quote(self, start: int) -> int:
        """Depth of the first quote from `start` on: a blank line ends a quote, not a list."""
        for depth in range(start, len(self._containers)):
            if isinstance(self._containers[depth], Quote):
                return depth
        return len(self._containers)

    def open(self, text: str, column: int) -> tuple[str, int]:
        """Open the containers that `text` at `column` begins; the rest of it, and its column."""
        while len(self._containers) < blocks.MAX_DEPTH:
            if text.startswith(">"):
                skip = 1 + (text[1:2] == " ")
                self._containers.append(Quote())
                text, column = text[skip:], column + skip
            else:
                num_lists = sum(isinstance(container, ListItem) for container in self._containers)
                opened = blocks.list_item(text, column, num_lists, self._palette.glyphs)
                if opened is None:
                    break
                self._containers.append(opened[0])
                text, column = opened[1], opened[0].content_indent
            indent = len(text) - len(text.lstrip(" "))
            text, column = text[indent:], column + indent
        return text, column

    def close(self, depth: int) -> None:
        del self._containers[depth:]

    def prefix(self) -> list[Run]:
        """What the next row begins with; a list marker is drawn once."""
        runs: list[Run] = []
        for container in self._containers:
            if isinstance(container, Quote):
                runs.append((f"{self._palette.glyphs.quote_bar} ", self._palette.dim))
            elif container.is_marker_pending:
                runs.append((f"{container.marker} ", self._palette.bullet))
                container.is_marker_pending = False
            else:
                runs.append((" " * _cells(container), self._palette.text))
        return runs


def _cells(container: Container) -> int:
    return cell_len(container.marker) + 1 if isinstance(container, ListItem) else 2
