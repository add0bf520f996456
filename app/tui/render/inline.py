"""Inline Markdown (bold, italic, code, strike, links as text) to styled runs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style

from .palette import Palette
from .sanitize import sanitize
from .width import Run

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

_SPECIAL = frozenset("*_`[]<>&\\~!")
_EMPHASIS = {"strong_open": Style(bold=True), "em_open": Style(italic=True), "s_open": Style(strike=True)}


def inline(text: str, base: Style, palette: Palette) -> list[list[Run]]:
    """The source lines of one paragraph, each as runs; emphasis may span lines."""
    if _SPECIAL.isdisjoint(text):
        return [[(line, base)] for line in text.split("\n")]
    writer = _Writer(base, palette)
    for token in _parser().parseInline(text)[0].children or ():
        writer.add(token)
    return writer.lines


class _Writer:
    def __init__(self, base: Style, palette: Palette):
        self.lines: list[list[Run]] = [[]]
        self._palette = palette
        self._styles = [base]
        self._links: list[tuple[str, list[str]]] = []
        """Open links: the address, and the link's text so far."""

    def add(self, token: Token) -> None:
        kind = token.type
        if kind in ("softbreak", "hardbreak"):
            self.lines.append([])
        elif kind == "code_inline":
            self._write(token.content, self._styles[-1] + self._palette.code)
        elif kind == "image":
            self._write(f"{token.content or 'image'} ({token.attrs.get('src', '')})", self._palette.link)
        elif kind == "link_open":
            self._links.append((str(token.attrs.get("href", "")), []))
            self._styles.append(self._styles[-1] + self._palette.link)
        elif kind == "link_close":
            self._styles.pop()
            self._close_link()
        elif kind in _EMPHASIS:
            self._styles.append(self._styles[-1] + _EMPHASIS[kind])
        elif kind.endswith("_close"):
            self._styles.pop()
        else:
            self._write(token.content, self._styles[-1])

    def _write(self, text: str, style: Style) -> None:
        first, *more = sanitize(text).split("\n")  # an entity (`&#8238;`) may have brought back what was dropped
        if first:
            self.lines[-1].append((first, style))
        self.lines.extend([(part, style)] for part in more)
        for _, parts in self._links:
            parts.append(text)

    def _close_link(self) -> None:
        """The address is always shown, so that a link cannot pretend to lead elsewhere."""
        address, parts = self._links.pop()
        shown = "".join(parts)
        if address and address.removeprefix("mailto:") != shown:
            self._write(f" ({address})", self._palette.dim)


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    """One parser for all; made at first use, because the import costs a quarter of the start-up."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
