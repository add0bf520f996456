"""Runs scheduled batches on a device that works on its own: a step is queued in one call and collected in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chatkv.kernels.executor import OnProgress, StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.triton.executor import StepOutputs, TritonExecutor
from chatkv.kernels.triton.graphs import DecodeGraphs
from chatkv.kernels.triton.stream import Mark, host_tensor
from chatkv.kernels.triton.transfer import zero_blocks

from .batch import Batch, BatchResult, SampleSpec
from .config import BLOCK_SIZE
from .device_images import DeviceImages
from .models.decoder import Decoder
from .step_rows import are_finite, last_rows, new_blocks, sequence_result, step_rows
from .step_sampler import DrawnTokens, StepSampler

WARM_UP_ROWS = (1, 2, 16, 64)
"""Rows of the chunks that are run once before there are requests: kernels differ in how many rows they take."""


class DeviceRunner:
    """Owns the block pool; implements `Runner` and `OverlappedRunner`. Used from the engine thread alone."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        sampler: StepSampler,
        max_context_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """model: on Triton's kernels. Without `warm_up` the first steps compile, and none is captured."""
        executor = model.executor
        assert isinstance(executor, TritonExecutor), f"{executor.description} is not a device of its own"
        self.model = model
        self._executor = executor
        self._stream = executor.stream
        self._sampler = sampler
        self._eos_ids = eos_ids
        executor.ensure_positions(max_context_tokens)
        with self._stream.active():
            self.pool = model.layout.new_pool(num_blocks, executor.device)
            """uint8 [num_blocks, block_bytes]"""
        self.images = DeviceImages(self.pool)
        """The same blocks as bytes, for lower tiers."""
        self._kv = model.layout.views(self.pool)
        self._graphs = DecodeGraphs(executor, self._kv, max_context_tokens)
        self._num_pending = 0
        """Ids that the step launched last samples."""

    @torch.inference_mode()
    def warm_up(self, max_batched_tokens: int, on_progress: OnProgress | None = None) -> None:
        """Compiles what steps will need and captures the decode steps. A chunk of `max_batched_tokens` takes the memory
        that the largest step takes. Nothing is written into blocks."""
        with self._stream.active():
            for num_rows in (*WARM_UP_ROWS, max_batched_tokens):
                self._executor.forward(self._executor.packer.pack(_idle_chunk(num_rows)), self._kv)
            self._graphs.capture(on_progress)
        self._stream.synchronize()

    def execute(self, batch: Batch) -> BatchResult:
        """One step. A sequence with non-finite numbers gets an error; the others are unharmed."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queues a step and returns; steps run in the order of launches. Token ids -1 - k are the k-th ids that the
        step launched before samples."""
        try:
            with self._stream.active():
                for source, destination in batch.block_copies:
                    self.pool[destination].copy_(self.pool[source])
                return self._launch(batch)
        except BaseException:
            # What was queued before the failure still runs, on blocks that will be given to others.
            self._stream.synchronize()
            raise

    @torch.inference_mode()
    def all_logits(self, batch: Batch) -> Tensor:
        """Run the batch without sampling -> float32 [num_tokens, vocab_size] on the host, a row for every token."""
        with self._stream.active():
            return self._forward_eagerly(step_rows(batch, range(batch.num_tokens))).logits.cpu()

    def _launch(self, batch: Batch) -> PendingStep:
        num_pending, self._num_pending = self._num_pending, 0
        if not batch.sequences:
            return PendingStep(batch, None, None, self._stream.mark())
        selected = [row for sequence, row in zip(batch.sequences, last_rows(batch), strict=True) if sequence.samples]
        rows = step_rows(batch, selected)
        if self._graphs.suits(rows):
            graph, blocks = self._graphs.pack(rows, new_blocks(rows.slots), num_pending)
            self._wipe(blocks)
            logits, is_row_finite = self._graphs.run(graph)
            logits_rows: Sequence[int] = selected
        else:
            logits, is_row_finite = self._forward_eagerly(rows, num_pending)
            logits_rows = range(len(selected))
        drawn, flags = None, [is_row_finite[: batch.num_tokens]]
        spec_rows = _spec_rows(batch, logits_rows)
        if spec_rows:
            chosen = self._rows_of(logits, spec_rows)
            # Not finite numbers are among the largest; those that are not numbers spread.
            flags.append(torch.linalg.vector_norm(chosen, float("inf"), dim=-1).isfinite())
            drawn = self._draw(chosen, [spec for sequence in batch.sequences for spec in sequence.samples])
        return PendingStep(batch, drawn, self._fetch(torch.cat(flags)), self._stream.mark())

    def _forward_eagerly(self, rows: StepRows, num_pending: int = 0) -> StepOutputs:
        inputs = self._executor.packer.pack(rows, new_blocks(rows.slots), num_pending)
        self._wipe(inputs.new_blocks)
        return self._executor.forward(inputs, self._kv)

    def _wipe(self, block_ids: Tensor) -> None:
        if len(block_ids):
            zero_blocks(self.pool, block_ids)

    def _rows_of(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(rows))):
            return logits[: len(rows)]
        indices = host_tensor(len(rows), torch.int64, self.pool.device)
        indices.numpy()[:] = rows
        return logits.index_select(0, indices.to(self.pool.device, non_blocking=True))

    def _draw(self, logits: Tensor, specs: Sequence[SampleSpec]) -> DrawnTokens:
        drawn = self._sampler.launch(logits, specs, self._eos_ids)
        self._executor.sampled_ids[: len(specs)].copy_(drawn.token_ids)
        self._num_pending = len(specs)
        return drawn

    def _fetch(self, flags: Tensor) -> Tensor:
        """On its way to the host."""
        fetched = host_tensor(len(flags), torch.bool, self.pool.device)
        return fetched.copy_(flags, non_blocking=True)


class PendingStep:
    """Implements `PendingResult`."""

    def __init__(self, batch: Batch, drawn: DrawnTokens | None, are_finite: Tensor | None, mark: Mark) -> None:
        """are_finite: bool, on the host once the mark is reached: a flag for each row, then one for the logits of each
        sample."""
        self._batch = batch
        self._drawn = drawn
        self._are_finite = are_finite
        self._mark = mark

    def is_ready(self) -> bool:
        try:
            return self._mark.is_reached
        except RuntimeError:  # which `wait` raises again
            return True

    def wait(self) -> BatchResult:
        self._mark.wait()
        if self._are_finite is None:
            return BatchResult()
        flags = self._are_finite.numpy()
        batch, num_rows = self._batch, self._batch.num_tokens
        sequences = zip(batch.sequences, are_finite(batch, flags[:num_rows]), strict=True)
        are_samples_finite = iter(flags[num_rows:].tolist())
        samples = iter(self._drawn.results() if self._drawn else ())
        results = []
        for sequence, ok in sequences:
            # In step with the sequences, also those that have failed.
            own_flags = [next(are_samples_finite) for _ in sequence.samples]
            own_samples = [next(samples) for _ in sequence.samples]
            results.append(sequence_result(sequence, ok and all(own_flags), iter(own_samples)))
        return BatchResult(tuple(results))


def _spec_rows(batch: Batch, logits_rows: Sequence[int]) -> list[int]:
    """For each specification its row of logits; `logits_rows`: one for each sequence that is sampled."""
    sampled = [sequence for sequence in batch.sequences if sequence.samples]
    return [row for sequence, row in zip(sampled, logits_rows, strict=True) for _ in sequence.samples]


def _idle_chunk(num_rows: int) -> StepRows:
    """A sequence that writes nothing."""
    table = [0] * -(-num_rows // BLOCK_SIZE)
    return StepRows([0] * num_rows, [-1] * num_rows, [SequenceSpan(num_rows, 0, table)], [num_rows - 1])
