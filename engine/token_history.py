"""Which ids a sequence has read and written, for penalties: kept from step to step, so that a long prompt is counted
once and not for every token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .batch import SampleSpec

Ids = NDArray[np.int64]

NUM_HISTORIES_KEPT = 64
"""Twice what runs at once by default. One that is missing is only counted again."""
CAPACITY_AT_FIRST = 256


class IdCounts:
    """Different ids in order of arrival, and how often each came. Adding one is O(1)."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: other ids are not counted."""
        self._vocab_size = vocab_size
        self._index_of: dict[int, int] = {}
        self._ids = np.empty(CAPACITY_AT_FIRST, np.int64)
        self._counts = np.empty(CAPACITY_AT_FIRST, np.int64)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> Ids:
        return self._counts[: len(self._index_of)]

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            index = self._index_of.get(token_id)
            if index is not None:
                self._counts[index] += 1
            elif 0 <= token_id < self._vocab_size:
                self._append(token_id)

    def _append(self, token_id: int) -> None:
        index = len(self._index_of)
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._index_of[token_id] = index
        self._ids[index], self._counts[index] = token_id, 1


class TokenHistory:
    """Of one sequence. Its output ids only ever grow at the end."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._output_token_ids = output_token_ids
        self._vocab_size = vocab_size
        self._seen: IdCounts | None = None
        self._written: IdCounts | None = None
        self._num_seen = 0
        self._num_written = 0

    def seen(self) -> IdCounts:
        """Of prompt and answer."""
        if self._seen is None:
            self._seen = IdCounts(self._vocab_size)
            self._seen.add(set(self._prompt_token_ids))
        if self._num_seen < len(self._output_token_ids):
            self._seen.add(self._output_token_ids[self._num_seen :])
            self._num_seen = len(self._output_token_ids)
        return self._seen

    def written(self) -> IdCounts:
        """Of the answer alone."""
        if self._written is None:
            self._written = IdCounts(self._vocab_size)
        if self._num_written < len(self._output_token_ids):
            self._written.add(self._output_token_ids[self._num_written :])
            self._num_written = len(self._output_token_ids)
        return self._written


class TokenHistories:
    """The latest ones. An entry holds the two sequences that name it, so their identities are not used again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._histories: OrderedDict[tuple[int, int], TokenHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def of(self, spec: SampleSpec) -> TokenHistory:
        key = (id(spec.prompt_token_ids), id(spec.output_token_ids))
        history = self._histories.get(key)
        if history is None:
            history = TokenHistory(spec.prompt_token_ids, spec.output_token_ids, self._vocab_size)
            self._histories[key] = history
            if len(self._histories) > NUM_HISTORIES_KEPT:
                self._histories.popitem(last=False)
        else:
            self._histories.move_to_end(key)
        return history
