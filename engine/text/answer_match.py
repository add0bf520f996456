"""Whether stored ids are those of an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer


class AnswerMatch(NamedTuple):
    token_ids: Sequence[int]
    num_chars: int | None
    """How much of the answer, white space before it not counted, the ids stand for. None: all of it."""
    num_spaces: int = 0
    """If num_chars is 0: how much of the white space before it they stand for."""


def match_answer(tokenizer: Tokenizer, token_ids: Sequence[int], content: str) -> AnswerMatch | None:
    """None if the ids say something else: the answer was edited, or they are another tokenizer's.

    White space at the ends does not matter: clients and templates strip it. The ids may be the beginning of the
    answer only, when a stop string or a cancel cut it within a token; even none, when that was the first.
    """
    text = tokenizer.decode(token_ids, is_text_start=False)
    core = content.strip()
    if core == text.strip():
        return AnswerMatch(token_ids, None)
    beginning = text.lstrip()
    if beginning and core.startswith(beginning):
        return AnswerMatch(token_ids, len(beginning))
    # An answer's prefix space is not shown.
    for space in (text, text.removeprefix(" ") if tokenizer.has_prefix_space else text):
        if not beginning and content.startswith(space):
            return AnswerMatch(token_ids, 0, len(space))
    return None
