"""Between a batch and the rows that kernels run: what goes in, and which sequences came out well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan

from .batch import Batch, ScheduledSequence, SequenceResult
from .config import BLOCK_SIZE
from .request import TokenLogprob

NOT_FINITE = "The model produced numbers that are not finite, so this answer cannot go on. Try again."


def step_rows(batch: Batch, selected: Sequence[int]) -> StepRows:
    return StepRows(
        token_ids=[token for sequence in batch.sequences for token in sequence.token_ids],
        slots=[slot for sequence in batch.sequences for slot in sequence.slot_mapping],
        spans=[SequenceSpan(len(s.token_ids), s.start_position, s.block_table) for s in batch.sequences],
        selected=selected,
    )


def new_blocks(slots: Sequence[int]) -> list[int]:
    """Blocks whose first slot is written in this step. A block begins empty: what it held before must not reach the
    slots behind a sequence's end, where a number that is not finite would spread through 0 * NaN."""
    return [slot // BLOCK_SIZE for slot in slots if slot >= 0 and slot % BLOCK_SIZE == 0]


def last_rows(batch: Batch) -> list[int]:
    """Of each sequence."""
    return list(accumulate((len(sequence.token_ids) for sequence in batch.sequences), initial=-1))[1:]


def are_finite(batch: Batch, is_row_finite: NDArray[np.bool_]) -> list[bool]:
    """Per sequence; `is_row_finite`: [num_tokens]."""
    if is_row_finite.all():
        return [True] * len(batch.sequences)
    lengths = [len(sequence.token_ids) for sequence in batch.sequences]
    lasts = last_rows(batch)
    return [bool(is_row_finite[last + 1 - n : last + 1].all()) for n, last in zip(lengths, lasts, strict=True)]


def sequence_result(
    sequence: ScheduledSequence, is_finite: bool, drawn: Iterator[tuple[int, TokenLogprob | None]]
) -> SequenceResult:
    """Takes the sequence's samples from `drawn`, if it has come out well."""
    if not is_finite:
        return SequenceResult(error=NOT_FINITE)
    samples = [next(drawn) for _ in sequence.samples]
    return SequenceResult(tuple(token for token, _ in samples), tuple(logprob for _, logprob in samples))
