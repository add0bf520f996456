"""From rendered text to token ids, run by run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from .escaping import unescape
from .run_memory import RunMemory
from .tokenizer import Tokenizer
from .tokenizer_file import AddedToken


class PromptBuilder:
    """Reads a rendered text from left to right; sampled ids are put where an answer stands."""

    def __init__(self, tokenizer: Tokenizer, text: str, borders: Sequence[int], memory: RunMemory | None):
        """`borders`: ascending offsets where a content begins or ends. A control token lies on one side of each:
        what is put together from a content and the text beside it is plain text."""
        self._tokenizer = tokenizer
        self._text = text
        self._borders = borders
        self._memory = memory
        self._chain = memory.chain() if memory else None
        self._ids: list[int] = []
        self._open_run: list[str] = []
        self._is_run_start = True
        self._is_text_start = True
        self._previous: AddedToken | None = None
        if tokenizer.adds_bos and tokenizer.bos_id is not None and not text.startswith(self._bos_text):
            self._append([tokenizer.bos_id])

    @property
    def _bos_text(self) -> str:
        return self._tokenizer.token_text(self._tokenizer.bos_id) if self._tokenizer.bos_id is not None else ""

    def read(self, start: int, end: int) -> None:
        """The template's text between two offsets."""
        position = start
        for token, at in self._control_tokens(start, end):
            self._open_run.append(self._text[position:at])
            self._close_run(strips_right=token.strips_left)
            position = at + len(token.text)
            self._put_control(token)
        self._open_run.append(self._text[position:end])

    def put_text(self, text: str) -> None:
        """Escaped text of a content: no control token in it."""
        self._open_run.append(text)

    def put_ids(self, token_ids: Sequence[int]) -> int:
        """A sampled answer. The run that it stands in goes on behind it. Returns how many ids stand before it."""
        self._close_run()
        num_before = len(self._ids)
        self._append(token_ids)
        self._is_run_start = False
        return num_before

    def recall(self, content: str) -> tuple[int, ...] | None:
        """The ids that were sampled for this answer after just this prompt, if remembered."""
        if self._memory is None or self._chain is None or not content.strip():
            return None
        return self._memory.find(self._chain.run_key(self._encode_open_run(), content))

    def finish(self) -> list[int]:
        self._close_run()
        return self._ids

    def _control_tokens(self, start: int, end: int) -> Iterator[tuple[AddedToken, int]]:
        pattern, borders = self._tokenizer.special_pattern, self._borders
        match = pattern.search(self._text, start, end)
        while match:
            at, behind = match.span()
            next_border = bisect_right(borders, at)
            if next_border < len(borders) and borders[next_border] < behind:
                behind = at + 1
            else:
                yield self._tokenizer.special_tokens[match[0]], at
            match = pattern.search(self._text, behind, end)

    def _put_control(self, token: AddedToken) -> None:
        is_second_bos = token.token_id == self._tokenizer.bos_id and self._ids == [token.token_id]
        if not is_second_bos:
            self._append([token.token_id])
        self._is_run_start, self._is_text_start = True, False
        self._previous = token

    def _close_run(self, *, strips_right: bool = False) -> None:
        ids = self._encode_open_run(strips_right=strips_right)
        if ids:
            self._append(ids)
            self._is_text_start = self._is_run_start = False
        self._open_run.clear()

    def _encode_open_run(self, *, strips_right: bool = False) -> list[int]:
        run = unescape("".join(self._open_run))
        if self._is_run_start and self._previous and self._previous.strips_right:
            run = run.lstrip()
        if strips_right:
            run = run.rstrip()
        return self._tokenizer.encode_run(run, is_run_start=self._is_run_start, is_text_start=self._is_text_start)

    def _append(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        if self._chain:
            self._chain.extend(token_ids)
