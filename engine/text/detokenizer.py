"""Token ids to text while they are sampled: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from .stop_strings import StopMatcher
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    """New text that is safe to show; often empty while bytes or a possible stop string are held."""
    is_stopped: bool = False
    """A stop string is complete. It is not part of any text."""
    num_tokens: int = 0
    """How many of the pushed ids were read: all, or up to the one that completed the stop string."""


class TextStream:
    """The text of one answer. All deltas joined are the decoded answer, cut before its first stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int] = (), stop: Sequence[str] = (), resume_text: str = ""
    ):
        """`prompt_tail_ids`: at least the prompt's last id; it tells whether a prefix space belongs to the answer.
        `resume_text`: the answer so far, shown already; a stop string may begin in it."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop)
        self._held = ""
        self._is_finished = False
        follows_text = bool(prompt_tail_ids) and prompt_tail_ids[-1] not in tokenizer.hidden_ids
        self._drops_prefix_space = tokenizer.has_prefix_space and not follows_text and not resume_text
        self._read_shown(resume_text[-max(map(len, stop), default=0) :] if stop else "")

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Once stopped, a stream gives no more text."""
        shown = []
        for num_read, token_id in enumerate(token_ids, start=1):
            text, is_stopped = self._read(self._decoder.decode(self._bytes_of(token_id)))
            shown.append(text)
            if is_stopped:
                return TextDelta("".join(shown), True, num_read)
        return TextDelta("".join(shown), False, len(token_ids))

    def finish(self) -> str:
        """What was held: no stop string came of it, and bytes that never became a character are U+FFFD."""
        text, is_stopped = self._read(self._decoder.decode(b"", final=True))
        if not is_stopped:
            text += self._held
        self._held, self._is_finished = "", True
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if data and self._drops_prefix_space:
            self._drops_prefix_space = False
            return data.removeprefix(b" ")
        return data

    def _read(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string is complete."""
        if self._is_finished:
            return "", True
        match = self._matcher.push(text)
        if match:
            num_read, match_length = match
            self._is_finished = True
            text = self._held + text[:num_read]
            self._held = ""
            return text[: max(0, len(text) - match_length)], True
        text = self._held + text
        # Part of what the matcher holds may lie in the text that was shown before this stream began.
        num_safe = max(0, len(text) - self._matcher.num_held)
        self._held = text[num_safe:]
        return text[:num_safe], False

    def _read_shown(self, text: str) -> None:
        """The answer went on after any stop string in here, so none of it counts."""
        while match := self._matcher.push(text):
            text = text[match[0] :]
            self._matcher.forget()


def answer_ids(tokenizer: Tokenizer, sampled_ids: Sequence[int], visible_text: str) -> tuple[int, ...]:
    """The ids to keep for an answer that a person sees as `visible_text` (cut by a stop string, a cancel, a kill).

    The longest prefix of the sampled ids whose text is a prefix of the visible text and ends on a whole character.
    Hidden tokens at its end (the end of the turn) are left to the template.
    """
    for drops_space in (False, True):
        kept = _matching_ids(tokenizer, sampled_ids, visible_text, drops_space)
        if kept or not tokenizer.has_prefix_space:
            return kept
    return ()


def _matching_ids(tokenizer: Tokenizer, ids: Sequence[int], visible_text: str, drops_space: bool) -> tuple[int, ...]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position, num_kept = 0, 0
    for index, token_id in enumerate(ids):
        data = tokenizer.token_bytes(token_id)
        if not data:
            continue
        if drops_space:
            data, drops_space = data.removeprefix(b" "), False
        text = decoder.decode(data)
        if not visible_text.startswith(text, position):
            break
        position += len(text)
        if not decoder.getstate()[0]:
            num_kept = index + 1
    return tuple(ids[:num_kept])
