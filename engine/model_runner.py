"""Runs a scheduled batch through the model: copies, inputs, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from chatkv.kernels.executor import StepResult

from .batch import Batch, BatchResult, SampleSpec, SequenceResult
from .models.decoder import Decoder
from .pool_images import PoolImages
from .ready_memory import ReadyMemory
from .request import TokenLogprob
from .step_rows import are_finite, last_rows, new_blocks, sequence_result, step_rows


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
        selected = [row for sequence, row in zip(batch.sequences, last_rows(batch), strict=True) if sequence.samples]
        logits, is_row_finite = self._run(batch, selected)
        return BatchResult(tuple(self._sample(batch, logits, are_finite(batch, is_row_finite))))

    def all_logits(self, batch: Batch) -> Tensor:
        """Run the batch without sampling -> float32 [num_tokens, vocab_size], a row for every token (for tests)."""
        self._copy_blocks(batch)
        return self._run(batch, range(batch.num_tokens)).logits.clone()

    @torch.inference_mode()
    def _copy_blocks(self, batch: Batch) -> None:
        for source, destination in batch.block_copies:
            self.pool[destination].copy_(self.pool[source])

    def _run(self, batch: Batch, selected: Sequence[int]) -> StepResult:
        rows = step_rows(batch, selected)
        for block_id in new_blocks(rows.slots):
            self.pool[block_id].zero_()
            self._reach(block_id)
        return self.model.run(rows, self._kv)

    def _reach(self, block_id: int) -> None:
        if self._ready is not None:
            self._ready.reach(block_id * self.images.image_bytes)

    def _sample(self, batch: Batch, logits: Tensor, are_hidden_finite: Sequence[bool]) -> list[SequenceResult]:
        """logits: a row for each sequence that is sampled; several specs may share it."""
        are_logits_finite = iter(_are_rows_finite(logits))
        kept: list[bool] = []
        rows: list[int] = []
        specs: list[SampleSpec] = []
        row = 0
        for sequence, ok in zip(batch.sequences, are_hidden_finite, strict=True):
            if sequence.samples:
                ok &= next(are_logits_finite)
                if ok:
                    rows += [row] * len(sequence.samples)
                    specs += sequence.samples
                row += 1
            kept.append(ok)
        chosen = logits if rows == list(range(len(logits))) else logits[rows]
        drawn = iter(self._sampler.sample(chosen, specs, self._eos_ids) if specs else ())
        return [sequence_result(sequence, ok, drawn) for sequence, ok in zip(batch.sequences, kept, strict=True)]


def _are_rows_finite(logits: Tensor) -> list[bool]:
    """Of float32 [n, vocab_size]. NaN and infinities are among the largest or the smallest."""
    if not len(logits):
        return []
    numbers = logits.cpu().numpy()
    is_finite = np.isfinite(numbers.max(axis=-1)) & np.isfinite(numbers.min(axis=-1))
    return [bool(ok) for ok in is_finite]
