"""Runs a scheduled batch through the model: copies, inputs, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from chatkv.kernels.reference_attention import SequenceSpan

from .batch import Batch, BatchResult, SampleSpec, ScheduledSequence, SequenceResult
from .config import BLOCK_SIZE
from .models.decoder import Decoder
from .pool_images import PoolImages
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
        self.pool = model.layout.new_pool(num_blocks, model.backend.device)
        """uint8 [num_blocks, block_bytes]"""
        self.images = PoolImages(self.pool)
        """The same blocks as bytes, for lower tiers."""
        self._kv = model.layout.views(self.pool)
        self._sampler = sampler
        self._eos_ids = eos_ids

    def execute(self, batch: Batch) -> BatchResult:
        """One step. A sequence with non-finite numbers gets an error; the others are unharmed."""
        if not batch.sequences:
            self._copy_blocks(batch)
            return BatchResult()
        hidden = self._forward(batch)
        is_row_finite = hidden.isfinite().all(-1)
        lengths = [len(sequence.token_ids) for sequence in batch.sequences]
        is_finite = [bool(rows.all()) for rows in is_row_finite.split(lengths)]
        sampled = self._sample(batch, hidden, is_finite)
        return BatchResult(tuple(sampled))

    def all_logits(self, batch: Batch) -> Tensor:
        """Run the batch without sampling -> float32 [num_tokens, vocab_size], a row for every token (for tests)."""
        return self.model.logits(self._forward(batch))

    @torch.inference_mode()
    def _copy_blocks(self, batch: Batch) -> None:
        for source, destination in batch.block_copies:
            self.pool[destination].copy_(self.pool[source])

    @torch.inference_mode()
    def _forward(self, batch: Batch) -> Tensor:
        self._copy_blocks(batch)
        slots = [slot for sequence in batch.sequences for slot in sequence.slot_mapping]
        # A block begins empty: what it held before must not reach the slots behind a sequence's end, where a
        # number that is not finite would spread through 0 * NaN.
        for slot in slots:
            if slot >= 0 and slot % BLOCK_SIZE == 0:
                self.pool[slot // BLOCK_SIZE].zero_()
        token_ids = [token for sequence in batch.sequences for token in sequence.token_ids]
        positions = [position for sequence in batch.sequences for position in _positions(sequence)]
        spans = [SequenceSpan(len(s.token_ids), s.start_position, s.block_table) for s in batch.sequences]
        ids, places, where = (torch.tensor(numbers, dtype=torch.int64) for numbers in (token_ids, positions, slots))
        return self.model.forward(ids, places, where, spans, self._kv)

    @torch.inference_mode()
    def _sample(self, batch: Batch, hidden: Tensor, is_finite: Sequence[bool]) -> list[SequenceResult]:
        """The head runs for last rows that are sampled only; several specs may share a row."""
        last_rows: list[int] = []
        end = 0
        for sequence, ok in zip(batch.sequences, is_finite, strict=True):
            end += len(sequence.token_ids)
            if ok and sequence.samples:
                last_rows.append(end - 1)
        logits = (
            self.model.logits(hidden[last_rows]) if last_rows else hidden.new_empty(0, self.model.config.vocab_size)
        )
        is_row_finite = iter(zip(logits, logits.isfinite().all(-1).tolist(), strict=True))
        kept: list[bool] = []
        rows: list[Tensor] = []
        specs: list[SampleSpec] = []
        for sequence, ok in zip(batch.sequences, is_finite, strict=True):
            if ok and sequence.samples:
                row, ok = next(is_row_finite)
                if ok:
                    rows += [row] * len(sequence.samples)
                    specs += sequence.samples
            kept.append(ok)
        drawn = iter(self._sampler.sample(torch.stack(rows), specs, self._eos_ids) if specs else ())
        return [_result(sequence, ok, drawn) for sequence, ok in zip(batch.sequences, kept, strict=True)]


def _positions(sequence: ScheduledSequence) -> range:
    return range(sequence.start_position, sequence.start_position + len(sequence.token_ids))


def _result(
    sequence: ScheduledSequence, is_finite: bool, drawn: Iterator[tuple[int, TokenLogprob | None]]
) -> SequenceResult:
    if not is_finite:
        return SequenceResult(error=NOT_FINITE)
    samples = [next(drawn) for _ in sequence.samples]
    return SequenceResult(tuple(token for token, _ in samples), tuple(logprob for _, logprob in samples))
