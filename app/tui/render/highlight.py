"""Code colour line by line: the lexer's state is carried over, so a fence costs the same streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .palette import Palette
from .width import Run

if TYPE_CHECKING:
    from pygments.lexer import Lexer

MAX_LINE_CHARS = 2000
"""Longer lines stay plain: a minified file must not hold the screen."""


class LineHighlighter:
    """Colours of one code block, fed one line at a time."""

    def __init__(self, language: str, palette: Palette):
        self._lexer = find_lexer(language)
        self._palette = palette
        self._stack: tuple[str, ...] = ("root",)
        self._is_in_comment = False

    def copy(self) -> LineHighlighter:
        twin = LineHighlighter.__new__(LineHighlighter)
        twin.__dict__.update(self.__dict__)
        return twin

    def line(self, text: str) -> list[Run]:
        """The line (without its newline) as runs on the code background."""
        plain = self._palette.code_text
        if self._lexer is None or len(text) > MAX_LINE_CHARS:
            return [(text, plain)] if text else []
        head: list[Run] = []
        if self._is_in_comment:
            comment, end, text = text.partition("*/")
            head = [(comment + end, self._palette.token_style(_comment_type()))]
            if not end:
                return head
            self._is_in_comment = False
        runs = [
            (part, self._palette.token_style(kind))
            for kind, value in self._tokens(text)
            if (part := value.replace("\n", ""))
        ]
        return head + runs

    def _tokens(self, text: str) -> Iterator[tuple[Any, str]]:
        kind, value = None, ""
        for kind, value in self._lex(text + "\n"):
            yield kind, value
        if kind is not None and value.lstrip().startswith("/*") and "*/" not in value:
            self._is_in_comment = kind in _comment_type()

    def _lex(self, text: str) -> Iterator[tuple[Any, str]]:
        from pygments.lexer import ExtendedRegexLexer, RegexLexer

        lexer = self._lexer
        if isinstance(lexer, RegexLexer) and not isinstance(lexer, ExtendedRegexLexer):
            yield from self._lex_with_state(text, lexer)
        elif lexer is not None:
            yield from ((kind, value) for _, kind, value in lexer.get_tokens_unprocessed(text))

    def _lex_with_state(self, text: str, lexer: Any) -> Iterator[tuple[Any, str]]:
        """The loop of `RegexLexer.get_tokens_unprocessed`, which does not give its final state back."""
        from pygments.token import Error, _TokenType

        definitions = lexer._tokens
        stack = list(self._stack)
        position = 0
        while position < len(text):
            for match_at, action, new_state in definitions[stack[-1]]:
                match = match_at(text, position)
                if match is None:
                    continue
                if type(action) is _TokenType:
                    yield action, match.group()
                elif action is not None:
                    yield from ((kind, value) for _, kind, value in action(lexer, match))
                position = match.end()
                _change_state(stack, new_state)
                break
            else:
                if text[position] == "\n":
                    stack = ["root"]
                yield Error, text[position]
                position += 1
        self._stack = tuple(stack)


def _change_state(stack: list[str], new_state: Any) -> None:
    if new_state is None:
        return
    if isinstance(new_state, int):
        del stack[new_state:]
    elif new_state == "#push":
        stack.append(stack[-1])
    else:
        for state in new_state:
            if state == "#pop":
                if len(stack) > 1:
                    stack.pop()
            else:
                stack.append(stack[-1] if state == "#push" else state)
    if not stack:
        stack.append("root")


@lru_cache(maxsize=64)
def find_lexer(language: str) -> Lexer | None:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


@lru_cache(maxsize=1)
def _comment_type() -> Any:
    from pygments.token import Comment

    return Comment
