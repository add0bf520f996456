"""Says to a person where a prompt left the cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..request import Miss
from .tokenizer import Tokenizer

_NUM_TOKENS_BEFORE = 16
_NUM_TOKENS_AFTER = 16


@dataclass(frozen=True, slots=True)
class MissReason:
    """Control tokens stand in these texts by their names."""

    position: int
    """Index of the first token that differs, in the prompt."""
    text_before: str
    """The end of what was the same."""
    text: str
    """What the prompt says from there on."""
    expected_text: str
    """What the nearest cached prompt said instead; "" if the cache simply ended."""

    def __str__(self) -> str:
        if not self.expected_text:
            return f"nothing cached after token {self.position}, {self.text_before!r}"
        return f"token {self.position}, after {self.text_before!r}: {self.text!r} instead of {self.expected_text!r}"


def explain_miss(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], miss: Miss) -> MissReason:
    """The first differing text and its position. `miss` is the engine's."""
    expected = miss.expected_token_ids
    pairs = enumerate(zip(expected, prompt_token_ids[miss.position :], strict=False))
    num_equal = next((index for index, (left, right) in pairs if left != right), len(expected))
    position = min(miss.position + num_equal, len(prompt_token_ids))
    before = prompt_token_ids[max(0, position - _NUM_TOKENS_BEFORE) : position]
    return MissReason(
        position=position,
        text_before=_shown(tokenizer, before),
        text=_shown(tokenizer, prompt_token_ids[position : position + _NUM_TOKENS_AFTER]),
        expected_text=_shown(tokenizer, expected[num_equal:]),
    )


def _shown(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Cut between tokens, so a character may lack bytes at either end."""
    data = b"".join(
        tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode() for token_id in token_ids
    )
    return data.decode(errors="replace")
