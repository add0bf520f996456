"""Decode steps as CUDA graphs: one launch instead of some ten for each layer.

A graph's sizes are fixed, so a batch is padded to the next size, with rows that write nothing and see nothing. There
are graphs for several widths of the block tables too, because attention starts work for each possible split of the
context. On a device without graphs the same padded steps run launch by launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..executor import OnProgress, StepRows
from ..kv_blocks import KVBlocks
from .executor import StepOutputs, TritonExecutor
from .step_inputs import StepInputs, StepShape
from .stream import DeviceStream

BATCH_SIZES = (16, 8, 4, 2, 1)
"""Large to small: later graphs find room in the memory of those before them."""
FIRST_TABLE_WIDTH = 128
"""Blocks: 2,048 tokens. Each further width is four times the one before."""


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One padded step."""

    shape: StepShape
    inputs: StepInputs
    outputs: StepOutputs | None
    """None: not captured."""
    cuda_graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """Steps of one row a sequence, all of which are selected. For one pool; used on the executor's stream."""

    def __init__(self, executor: TritonExecutor, kv: KVBlocks, max_context_tokens: int) -> None:
        self._executor = executor
        self._kv = kv
        self._device = executor.device
        self._widths = table_widths(max_context_tokens, kv.block_size)
        largest = StepShape(BATCH_SIZES[0], BATCH_SIZES[0], self._widths[0], BATCH_SIZES[0], BATCH_SIZES[0])
        # All graphs read the same memory: steps follow one another.
        self._packed = torch.zeros(largest.size, dtype=torch.int32, device=self._device)
        self._logits = torch.zeros(BATCH_SIZES[0], executor.vocab_size, device=self._device)
        self._graphs = {
            (num_rows, width): self._uncaptured(num_rows, width) for width in self._widths for num_rows in BATCH_SIZES
        }
        self._angles: tuple[Tensor, ...] = ()

    @property
    def graphs(self) -> list[DecodeGraph]:
        return list(self._graphs.values())

    def capture(self, on_progress: OnProgress | None = None) -> None:
        """All graphs, before which they run launch by launch. Compiles what is not compiled yet; some seconds."""
        if self._device.type != "cuda":
            return
        # Graphs know addresses, and keep nothing alive themselves.
        self._angles = self._executor.angles
        memory = torch.cuda.graph_pool_handle()
        # Torch's default stream cannot be captured.
        stream = DeviceStream(self._device)
        stream.wait_for(self._executor.stream.mark())
        with stream.active():
            for done, (key, graph) in enumerate(self._graphs.items(), start=1):
                self._graphs[key] = self._captured(graph, memory, stream)
                if on_progress:
                    on_progress(done / len(self._graphs))
        stream.synchronize()

    def suits(self, rows: StepRows) -> bool:
        """A decode batch that is not larger than the largest graph."""
        spans = rows.spans
        if not spans or len(spans) > BATCH_SIZES[0] or len(rows.token_ids) != len(spans):
            return False
        return len(rows.selected) > 0 and max(len(span.block_table) for span in spans) <= self._widths[0]

    def pack(self, rows: StepRows, new_blocks: Sequence[int] = (), num_pending: int = 0) -> tuple[DecodeGraph, Tensor]:
        """The smallest graph that holds the rows, its inputs filled, and the new blocks on the device."""
        num_rows = len(rows.spans)
        width = max(len(span.block_table) for span in rows.spans)
        graph = self._graphs[
            min(size for size in BATCH_SIZES if size >= num_rows), min(size for size in self._widths if size >= width)
        ]
        packed = self._packed[: graph.shape.size]
        self._executor.packer.pack_into(packed, graph.shape, rows, new_blocks, num_pending)
        return graph, graph.inputs.new_blocks[: len(new_blocks)]

    def run(self, graph: DecodeGraph) -> StepOutputs:
        """A row of logits for each row of the graph, padding included, valid until the next step."""
        if graph.outputs is None or graph.cuda_graph is None:
            return self._forward(graph.inputs)
        graph.cuda_graph.replay()
        return graph.outputs

    def _uncaptured(self, num_rows: int, width: int) -> DecodeGraph:
        shape = StepShape(num_rows, num_rows, width, num_rows, num_rows)
        inputs = StepInputs.of(self._packed[: shape.size], shape, max_rows=1, is_all_selected=True)
        return DecodeGraph(shape, inputs, None, None)

    def _captured(self, graph: DecodeGraph, memory: Any, stream: DeviceStream) -> DecodeGraph:
        graph.inputs.fill_with_padding()
        # Once launch by launch: compiling is no work for a graph.
        self._forward(graph.inputs)
        stream.synchronize()
        cuda_graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: they lock host memory.
        with torch.cuda.graph(cuda_graph, memory, stream.cuda_stream, capture_error_mode="thread_local"):
            outputs = self._forward(graph.inputs)
        return replace(graph, outputs=outputs, cuda_graph=cuda_graph)

    def _forward(self, inputs: StepInputs) -> StepOutputs:
        return self._executor.forward(inputs, self._kv, self._logits[: len(inputs.token_ids)])


def table_widths(max_context_tokens: int, block_size: int) -> list[int]:
    """Widths of block tables, largest first: the last one holds the context."""
    longest = -(-max_context_tokens // block_size)
    widths = [FIRST_TABLE_WIDTH]
    while widths[0] < longest:
        widths.insert(0, 4 * widths[0])
    widths[0] = longest
    return widths
