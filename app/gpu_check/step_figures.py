"""A decode step of an 8B model as the engine runs it, against the bytes that it must read."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from chatkv.engine.batch import Batch, SampleSpec, ScheduledSequence
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.device_runner import DeviceRunner
from chatkv.engine.request import SamplingParams
from chatkv.kernels import KernelChoice
from chatkv.kernels.executor import StepRows
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.triton.executor import TritonExecutor
from chatkv.kernels.triton.graphs import DecodeGraphs
from chatkv.kernels.weights import Weight

from .bench_device import BenchDevice
from .machine import Machine
from .random_data import int4_weight, int8_weight
from .random_model import llama_config, random_decoder
from .results import Results
from .sizes import Sizes

STEP_SHARE, OVERHEAD_MS = 0.75, 0.3
BATCHES = (1, 8)
CONTEXT_TOKENS, DRY_CONTEXT_TOKENS = 1024, 48
NUM_STEPS = 50
GREEDY = SamplingParams(temperature=0.0)


class StepFigures:
    """Matrices in int4 groups with minimums; the table and the head in int8."""

    def __init__(self, bench: BenchDevice, machine: Machine, sizes: Sizes, results: Results) -> None:
        self._bench, self._machine, self._sizes, self._results = bench, machine, sizes, results
        self._num_tokens = CONTEXT_TOKENS if bench.is_cuda else DRY_CONTEXT_TOKENS
        self._blocks_each = -(-self._num_tokens // BLOCK_SIZE) + 1

    def measure(self) -> None:
        with self._results.section("decode step, 8B shape, int4"), torch.inference_mode():
            self._measure()

    def _measure(self) -> None:
        sizes, device = self._sizes, self._bench.device
        choice = KernelChoice(
            str(device) if self._bench.is_cuda else "interpreter", compute_dtype=sizes.compute_dtypes[0]
        )
        make, make_head = (partial(_on, device, kind) for kind in (int4_weight, int8_weight))
        decoder = random_decoder(llama_config(sizes), choice, make, make_head)
        runner = DeviceRunner(
            decoder,
            max(BATCHES) * self._blocks_each,
            sizes.vocab_size,
            self._blocks_each * BLOCK_SIZE,
        )
        since = time.monotonic()
        runner.warm_up(max(BATCHES))
        self._results.figure("compiling and capturing", time.monotonic() - since, "s")
        table_bytes = sizes.vocab_size * sizes.hidden_size * 17 // 16
        for batch in BATCHES:
            kv_bytes = batch * self._num_tokens * decoder.layout.used_bytes // BLOCK_SIZE
            bound_s = (decoder.weight_bytes - table_bytes + kv_bytes) / self._machine.copy_bytes_per_s
            self._measure_batch(runner, batch, bound_s)

    def _measure_batch(self, runner: DeviceRunner, batch: int, bound_s: float) -> None:
        """Steps as the engine makes them: the next one is launched before the last one is over."""
        graph_s = self._graph_s(runner, batch)
        step_s = self._step_s(runner, batch)
        note = f"{step_s * 1e3:.2f} ms, {batch / step_s:.0f} tok/s behind {self._num_tokens} tokens"
        name = f"batch {batch}: bytes to read at the copy rate, over the time"
        self._results.figure(name, bound_s / step_s, "", STEP_SHARE, note=note)
        name = f"batch {batch}: beside the graph"
        note = "sampling, inputs, launch, results"
        self._results.figure(name, (step_s - graph_s) * 1e3, "ms", OVERHEAD_MS, is_limit=True, note=note)

    def _graph_s(self, runner: DeviceRunner, batch: int) -> float:
        """The forward pass alone."""
        executor = runner.model.executor
        assert isinstance(executor, TritonExecutor)
        with executor.stream.active():
            graphs = DecodeGraphs(executor, runner.model.layout.views(runner.pool), self._blocks_each * BLOCK_SIZE)
            graphs.capture()
            sequences = self._batch(batch, is_first=True).sequences
            spans = [SequenceSpan(1, sequence.start_position, sequence.block_table) for sequence in sequences]
            slots = [slot for sequence in sequences for slot in sequence.slot_mapping]
            graph, _ = graphs.pack(StepRows([1] * batch, slots, spans, range(batch)))
            return self._bench.median_s(lambda index: graphs.run(graph))

    def _step_s(self, runner: DeviceRunner, batch: int) -> float:
        num_steps = NUM_STEPS if self._bench.is_cuda else 2
        before = runner.launch(self._batch(batch, is_first=True))
        durations: list[float] = []
        since = time.perf_counter()
        for _ in range(num_steps):
            step = runner.launch(self._batch(batch, is_first=False))
            before.wait()
            before = step
            now = time.perf_counter()
            durations.append(now - since)
            since = now
        before.wait()
        return sorted(durations)[len(durations) // 2]

    def _batch(self, batch: int, is_first: bool) -> Batch:
        """Each sequence runs at the same position again and again, so that all steps read as much."""
        sequences = []
        for number in range(batch):
            table = range(number * self._blocks_each, (number + 1) * self._blocks_each)
            position = self._num_tokens
            sequences.append(
                ScheduledSequence(
                    request_id=str(number),
                    token_ids=[1 if is_first else -1 - number],
                    start_position=position,
                    block_table=table,
                    slot_mapping=[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE],
                    samples=[SampleSpec(GREEDY, 0, position + 1, (), ())],
                )
            )
        return Batch(sequences)


def _on(device: torch.device, make: Callable[..., Weight], num_rows: int, num_columns: int) -> Weight:
    return make(num_rows, num_columns, device)
