"""Runs a scheduled batch through the model: copies, inputs, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatkv.kernels.executor import StepResult, StepRows
from chatkv.kernels.reference_attention import SequenceSpan

from .batch import Batch, BatchResult, SampleSpec, ScheduledSequence, SequenceResult
from .config import BLOCK_SIZE
from .models.decoder import Decoder
from .pool_images import PoolImages
from .ready_memory import ReadyMemory
from .request import TokenLogprob

NOT_FINITE = "The model produced numbers that are not finite, so this answer cannot go on. Try again."


class TokenSampler(Protocol):
    """Draws one token a row (engine/sampler.py)."""

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]
    ) -> list[tuple[int, TokenLogprob | None]]: ...


class ModelRunner:
    """Owns the block pool; implements `Runner`. Used from the engine thread alone."""

    def __init__(self, model: Decoder, num_blocks: int, sampler: TokenSampler, eos_ids: frozenset[int] = frozenset()):
        self.model = model
        self.pool = model.layout.new_pool(num_blocks, model.device)
        """uint8 [num_blocks, block_bytes]"""
        self._ready = ReadyMemory(self.pool) if self.pool.device.type == "cpu" else None
        self.images = PoolImages(self.pool, self._reach)
        """The same blocks as bytes, for lower tiers."""
        self._kv = model.layout.views(self.pool)
        self._sampler = sampler
        self._eos_ids = eos_ids

    def execute(self, batch: Batch) -> BatchResult:
        """One step. A sequence with non-finite numbers gets an error; the others are unharmed."""
        self._copy_blocks(batch)
        if not batch.sequences:
            return BatchResult()
        last_rows = list(accumulate((len(sequence.token_ids) for sequence in batch.sequences), initial=-1))[1:]
        selected = [row for sequence, row in zip(batch.sequences, last_rows, strict=True) if sequence.samples]
        logits, is_row_finite = self._run(batch, selected)
        are_finite = _are_finite(batch, last_rows, is_row_finite)
        return BatchResult(tuple(self._sample(batch, logits, are_finite)))

    def all_logits(self, batch: Batch) -> Tensor:
        """Run the batch without sampling -> float32 [num_tokens, vocab_size], a row for every token (for tests)."""
        self._copy_blocks(batch)
        return self._run(batch, range(batch.num_tokens)).logits.clone()

    @torch.inference_mode()
    def _copy_blocks(self, batch: Batch) -> None:
        for source, destination in batch.block_copies:
            self.pool[destination].copy_(self.pool[source])

    def _run(self, batch: Batch, selected: Sequence[int]) -> StepResult:
        slots = [slot for sequence in batch.sequences for slot in sequence.slot_mapping]
        # A block begins empty: what it held before must not reach the slots behind a sequence's end, where a
        # number that is not finite would spread through 0 * NaN.
        for slot in slots:
            if slot >= 0 and slot % BLOCK_SIZE == 0:
                self.pool[slot // BLOCK_SIZE].zero_()
                self._reach(slot // BLOCK_SIZE)
        token_ids = [token for sequence in batch.sequences for token in sequence.token_ids]
        spans = [SequenceSpan(len(s.token_ids), s.start_position, s.block_table) for s in batch.sequences]
        return self.model.run(StepRows(token_ids, slots, spans, selected), self._kv)

    def _reach(self, block_id: int) -> None:
        if self._ready is not None:
            self._ready.reach(block_id * self.images.image_bytes)

    def _sample(self, batch: Batch, logits: Tensor, are_finite: Sequence[bool]) -> list[SequenceResult]:
        """logits: a row for each sequence that is sampled; several specs may share it."""
        are_logits_finite = iter(_are_rows_finite(logits))
        kept: list[bool] = []
        rows: list[int] = []
        specs: list[SampleSpec] = []
        row = 0
        for sequence, ok in zip(batch.sequences, are_finite, strict=True):
            if sequence.samples:
                ok &= next(are_logits_finite)
                if ok:
                    rows += [row] * len(sequence.samples)
                    specs += sequence.samples
                row += 1
            kept.append(ok)
        chosen = logits if rows == list(range(len(logits))) else logits[rows]
        drawn = iter(self._sampler.sample(chosen, specs, self._eos_ids) if specs else ())
        return [_result(sequence, ok, drawn) for sequence, ok in zip(batch.sequences, kept, strict=True)]


def _are_finite(batch: Batch, last_rows: Sequence[int], is_row_finite: NDArray[np.bool_]) -> list[bool]:
    """Per sequence."""
    if is_row_finite.all():
        return [True] * len(last_rows)
    lengths = [len(sequence.token_ids) for sequence in batch.sequences]
    return [bool(is_row_finite[last + 1 - n : last + 1].all()) for n, last in zip(lengths, last_rows, strict=True)]


def _are_rows_finite(logits: Tensor) -> list[bool]:
    """Of float32 [n, vocab_size]. NaN and infinities are among the largest or the smallest."""
    if not len(logits):
        return []
    numbers = logits.cpu().numpy()
    is_finite = np.isfinite(numbers.max(axis=-1)) & np.isfinite(numbers.min(axis=-1))
    return [bool(ok) for ok in is_finite]


def _result(
    sequence: ScheduledSequence, is_finite: bool, drawn: Iterator[tuple[int, TokenLogprob | None]]
) -> SequenceResult:
    if not is_finite:
        return SequenceResult(error=NOT_FINITE)
    samples = [next(drawn) for _ in sequence.samples]
    return SequenceResult(tuple(token for token, _ in samples), tuple(logprob for _, logprob in samples))
