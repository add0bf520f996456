"""The device under test: how its work is timed. A dry run has the CPU and the interpreter in its place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

NUM_WARM_UPS = 3
NUM_REPEATS = 15
MIN_BATCH_S = 200e-6
"""Several runs between two events, until they take that long: an event resolves about half a microsecond."""
MAX_BATCH = 64
CACHE_TIMES = 3
"""Inputs of one timing are rotated until they are this many times the second level cache."""


class BenchDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.kernel_device = str(device) if self.is_cuda else "interpreter"
        """As `KernelChoice` names it."""

    @property
    def cache_bytes(self) -> int:
        """Of the last level that all processors share."""
        if not self.is_cuda:
            return 0
        return int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)) or 64 << 20

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def num_sets(self, input_bytes: int) -> int:
        """How many different inputs of that size keep the cache from answering."""
        return max(2, min(64, -(-CACHE_TIMES * self.cache_bytes // max(input_bytes, 1)))) if self.is_cuda else 2

    def median_s(self, run: Callable[[int], object], num_sets: int = 1, *, is_captured: bool = False) -> float:
        """Seconds of one `run(i)`, with i = 0 .. num_sets - 1 in turn. is_captured: as decode steps run, without the
        time that Python takes to launch, which is more than a small kernel's own on a fast card."""
        for index in range(NUM_WARM_UPS if self.is_cuda else 1):
            run(index % num_sets)
        self.synchronize()
        if not self.is_cuda:
            return self._host_s(run, num_sets)
        return self._captured_s(run, num_sets) if is_captured else self._cuda_s(run, num_sets)

    def _cuda_s(self, run: Callable[[int], object], num_sets: int) -> float:
        size = self._batch_size(run, num_sets)
        starts = range(0, NUM_REPEATS * size, size)
        return statistics.median(self._batch_s(run, range(start, start + size), num_sets) for start in starts)

    def _captured_s(self, run: Callable[[int], object], num_sets: int) -> float:
        size = max(self._batch_size(run, num_sets), num_sets)
        # Torch's default stream cannot be captured.
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(size):
                run(index % num_sets)
        graph.replay()
        batches = (self._batch_s(lambda index: graph.replay(), range(1), 1) for _ in range(NUM_REPEATS))
        return statistics.median(batches) / size

    def _batch_size(self, run: Callable[[int], object], num_sets: int) -> int:
        once = self._batch_s(run, range(1), num_sets)
        return max(1, min(MAX_BATCH, round(MIN_BATCH_S / max(once, 1e-6))))

    def _batch_s(self, run: Callable[[int], object], indices: Sequence[int], num_sets: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in indices:
            run(index % num_sets)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / len(indices)

    def _host_s(self, run: Callable[[int], object], num_sets: int) -> float:
        since = time.perf_counter()
        run(0)
        return time.perf_counter() - since
