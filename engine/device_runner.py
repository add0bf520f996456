"""Runs scheduled batches on a device that works on its own: a step is queued in one call and collected in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chatkv.kernels.executor import OnProgress, StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.triton.executor import StepOutputs, TritonExecutor
from chatkv.kernels.triton.graphs import DecodeGraphs
from chatkv.kernels.triton.stream import Mark, host_tensor
from chatkv.kernels.triton.transfer import zero_blocks

from .batch import Batch, BatchResult
from .config import BLOCK_SIZE
from .device_images import DeviceImages
from .device_sampler import DeviceSampler, DrawnToken
from .models.decoder import Decoder
from .sample_plan import SamplePlan
from .step_rows import are_finite, last_rows, new_blocks, sequence_result, step_rows

WARM_UP_ROWS = (2, 64)
"""Rows of the chunks that are run once before there are requests: kernels differ in how many rows they take. Single
rows are run when decode steps are captured."""


class DeviceRunner:
    """Owns the block pool; implements `Runner` and `OverlappedRunner`. Used from the engine thread alone."""

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        num_tokens: int,
        max_context_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """model: on Triton's kernels. num_tokens: ids from there on are padding of the head, and never drawn.
        Without `warm_up` the first steps compile, and none is captured."""
        executor = model.executor
        assert isinstance(executor, TritonExecutor), f"{executor.description} is not a device of its own"
        self.model = model
        self._executor = executor
        self._stream = executor.stream
        self._sampler = DeviceSampler(num_tokens, executor.device)
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
        that the largest step takes, and torch keeps it. Nothing is written into blocks."""
        chunks = [num_rows for num_rows in WARM_UP_ROWS if num_rows < max_batched_tokens] + [max_batched_tokens]
        report = on_progress or (lambda share: None)
        self._executor.ensure_positions(max_batched_tokens)
        with self._stream.active():
            # First: a capture gives all memory back that is not in use, and the chunks' is to stay.
            self._graphs.capture(lambda share: report(share / 2))
            for done, num_rows in enumerate(chunks, start=1):
                logits = self._executor.forward(self._executor.packer.pack(_idle_chunk(num_rows)), self._kv).logits
                self._stream.synchronize()
                report(0.5 + done / len(chunks) / 2)
            self._sampler.warm_up(logits)
            zero_blocks(torch.empty_like(self.pool[:1]), torch.zeros(1, dtype=torch.int32, device=self.pool.device))
        self._stream.synchronize()
        self.images.warm_up()
        report(1.0)

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
            outputs = self._graphs.run(graph)
            drawn = self._draw(batch, outputs.logits, selected)
        else:
            outputs = self._forward_eagerly(rows, num_pending)
            drawn = self._draw(batch, outputs.logits, range(len(selected)))
        is_row_finite = self._fetch(outputs.is_finite[: batch.num_tokens])
        return PendingStep(batch, is_row_finite, drawn, self._stream.mark())

    def _forward_eagerly(self, rows: StepRows, num_pending: int = 0) -> StepOutputs:
        inputs = self._executor.packer.pack(rows, new_blocks(rows.slots), num_pending)
        self._wipe(inputs.new_blocks)
        return self._executor.forward(inputs, self._kv)

    def _wipe(self, block_ids: Tensor) -> None:
        if len(block_ids):
            zero_blocks(self.pool, block_ids)

    def _draw(self, batch: Batch, logits: Tensor, logits_rows: Sequence[int]) -> DrawnTokens | None:
        """logits_rows: one for each sequence that is sampled; several tokens may be drawn from it."""
        sampled = [sequence for sequence in batch.sequences if sequence.samples]
        if not sampled:
            return None
        specs = [spec for sequence in sampled for spec in sequence.samples]
        rows = [row for sequence, row in zip(sampled, logits_rows, strict=True) for _ in sequence.samples]
        plan = self._sampler.prepare(specs, self._eos_ids, rows)
        drawn = self._sampler.launch(logits, plan)
        self._executor.sampled_ids[: len(specs)].copy_(drawn.token_ids)
        self._num_pending = len(specs)
        return DrawnTokens(self._sampler, plan, self._fetch(drawn.packed))

    def _fetch(self, numbers: Tensor) -> Tensor:
        """On its way to the host."""
        fetched = host_tensor(len(numbers), numbers.dtype, self.pool.device)
        return fetched.copy_(numbers, non_blocking=True)


class DrawnTokens(NamedTuple):
    """What a step draws; `packed` is on the host once the step is over."""

    sampler: DeviceSampler
    plan: SamplePlan
    packed: Tensor

    def read(self) -> list[DrawnToken]:
        return self.sampler.read(self.packed, self.plan)


class PendingStep:
    """Implements `PendingResult`."""

    def __init__(self, batch: Batch, is_row_finite: Tensor | None, drawn: DrawnTokens | None, mark: Mark) -> None:
        """is_row_finite: bool [num_tokens], on the host once the mark is reached, as what is drawn."""
        self._batch = batch
        self._is_row_finite = is_row_finite
        self._drawn = drawn
        self._mark = mark

    def is_ready(self) -> bool:
        try:
            return self._mark.is_reached
        except RuntimeError:  # which `wait` raises again
            return True

    def wait(self) -> BatchResult:
        self._mark.wait()
        if self._is_row_finite is None:
            return BatchResult()
        tokens = iter(self._drawn.read() if self._drawn else ())
        results = []
        sequences = zip(self._batch.sequences, are_finite(self._batch, self._is_row_finite.numpy()), strict=True)
        for sequence, ok in sequences:
            # In step with the sequences, also those that have failed.
            own = [next(tokens) for _ in sequence.samples]
            ok &= all(token.is_finite for token in own)
            results.append(sequence_result(sequence, ok, ((token.token_id, token.logprob) for token in own)))
        return BatchResult(tuple(results))


def _idle_chunk(num_rows: int) -> StepRows:
    """A sequence that writes nothing, with as many logits as a step of many decodes has."""
    table, selected = [0] * -(-num_rows // BLOCK_SIZE), range(max(num_rows - WARM_UP_ROWS[-1], 0), num_rows)
    return StepRows([0] * num_rows, [-1] * num_rows, [SequenceSpan(num_rows, 0, table)], selected)
