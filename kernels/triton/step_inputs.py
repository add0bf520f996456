"""What a step is told, as device tensors: packed into one host buffer, copied in one go.

Every part begins at a multiple of 16 bytes, so that kernels find the same alignment whatever the number of rows.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..executor import StepRows
from .stream import DeviceStream, Mark, host_tensor

NUM_HOST_BUFFERS = 3
"""Two steps are on their way while a third is packed."""
_ALIGNMENT = 4
"""Of parts, in int32 numbers."""
_FIRST_CAPACITY = 1 << 14


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's parts. Rows and sequences beyond those of a batch are padding."""

    num_rows: int
    num_sequences: int
    table_width: int
    """Blocks of the longest block table."""
    num_selected: int
    num_new_blocks: int

    @classmethod
    def of(cls, rows: StepRows, num_new_blocks: int) -> StepShape:
        width = max(len(span.block_table) for span in rows.spans)
        return cls(len(rows.token_ids), len(rows.spans), width, len(rows.selected), num_new_blocks)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where parts begin and end in the packed buffer, counted in int32 numbers: slots (two each), token ids,
        positions, lengths, start positions, cu_rows, selected rows, new blocks, block tables."""
        return _bounds(self)

    @property
    def size(self) -> int:
        """Of the packed buffer, in int32 numbers."""
        return self.bounds[-1][1]


@lru_cache(maxsize=64)
def _bounds(shape: StepShape) -> list[tuple[int, int]]:
    """Captured steps ask for theirs again and again."""
    rows, sequences = shape.num_rows, shape.num_sequences
    sizes = [2 * rows, rows, rows, sequences, sequences, sequences + 1]
    sizes += [shape.num_selected, shape.num_new_blocks, sequences * shape.table_width]
    starts = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    return [(start, start + size) for size, (start, _) in zip(sizes, pairwise(starts), strict=True)]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of one packed buffer on the device: int32, but for slots."""

    slots: Tensor
    """int64 [num_rows]; -1: K and V are not written."""
    token_ids: Tensor
    """[num_rows]; -1 - k: the id that the step before has sampled as its k-th."""
    positions: Tensor
    """[num_rows]"""
    lengths: Tensor
    """[num_sequences]: positions of a sequence up to its last row in this step; 0: padding."""
    start_positions: Tensor
    """[num_sequences]: of the first row."""
    cu_rows: Tensor
    """[num_sequences + 1]: the rows of sequence i are cu_rows[i] .. cu_rows[i + 1] - 1; padding has none."""
    selected: Tensor
    """[num_selected]: rows whose logits are wanted."""
    new_blocks: Tensor
    """[num_new_blocks]: blocks that begin empty; what lies in them is to be wiped before the step."""
    block_tables: Tensor
    """[num_sequences, table_width]; zeros behind a table's end."""
    max_rows: int
    """Of a sequence."""
    is_all_selected: bool
    """`selected` is 0, 1, ... num_rows - 1."""

    def fill_with_padding(self) -> None:
        """Nobody's rows: they write nothing and see nothing."""
        self.slots.fill_(-1)
        for part in (self.token_ids, self.positions, self.lengths, self.start_positions, self.cu_rows):
            part.zero_()

    @property
    def is_decode(self) -> bool:
        """One row a sequence."""
        return self.max_rows == 1

    @classmethod
    def of(cls, packed: Tensor, shape: StepShape, *, max_rows: int, is_all_selected: bool) -> StepInputs:
        """packed: int32 [shape.size]."""
        slots, token_ids, positions, lengths, starts, cu_rows, selected, new_blocks, tables = (
            packed[start:stop] for start, stop in shape.bounds
        )
        return cls(
            slots.view(torch.int64),
            token_ids,
            positions,
            lengths,
            starts,
            cu_rows,
            selected,
            new_blocks,
            tables.view(shape.num_sequences, shape.table_width),
            max_rows,
            is_all_selected,
        )


class InputPacker:
    """Fills host buffers in turn, each again only when its copy to the device is done. On one thread."""

    def __init__(self, stream: DeviceStream, vocab_size: int) -> None:
        self._stream = stream
        self._vocab_size = vocab_size
        self._buffers: deque[tuple[Tensor, Mark]] = deque()
        for _ in range(NUM_HOST_BUFFERS):
            self._buffers.append((host_tensor(_FIRST_CAPACITY, torch.int32, stream.device), Mark()))

    def pack(self, rows: StepRows, new_blocks: Sequence[int] = (), num_pending: int = 0) -> StepInputs:
        """In new device memory. num_pending: ids that the step before samples.

        Raises IndexError for a token id that is neither the model's nor one of those.
        """
        shape = StepShape.of(rows, len(new_blocks))
        packed = torch.empty(shape.size, dtype=torch.int32, device=self._stream.device)
        self.pack_into(packed, shape, rows, new_blocks, num_pending)
        max_rows = max(span.num_rows for span in rows.spans)
        is_all_selected = list(rows.selected) == list(range(shape.num_rows))
        return StepInputs.of(packed, shape, max_rows=max_rows, is_all_selected=is_all_selected)

    def pack_into(
        self, packed: Tensor, shape: StepShape, rows: StepRows, new_blocks: Sequence[int] = (), num_pending: int = 0
    ) -> None:
        """packed: int32 [shape.size] on the device. Where the shape is larger than the batch, the rest is padding."""
        self._check(rows, num_pending)
        host, mark = self._buffers.popleft()
        mark.wait()
        if len(host) < shape.size:
            host = host_tensor(2 * shape.size, torch.int32, self._stream.device)
        _fill(host.numpy()[: shape.size], shape, rows, new_blocks)
        packed.copy_(host[: shape.size], non_blocking=True)
        self._buffers.append((host, self._stream.mark()))

    def _check(self, rows: StepRows, num_pending: int) -> None:
        """The kernels trust what they are given."""
        if min(rows.token_ids) < -num_pending or max(rows.token_ids) >= self._vocab_size:
            raise IndexError(f"a token id is not within 0 .. {self._vocab_size - 1}")
        assert len(rows.token_ids) == len(rows.slots) == sum(span.num_rows for span in rows.spans)


def _fill(packed: NDArray[np.int32], shape: StepShape, rows: StepRows, new_blocks: Sequence[int]) -> None:
    spans, num_rows = rows.spans, len(rows.token_ids)
    slots, token_ids, positions, lengths, starts, cu_rows, selected, new, tables = (
        packed[start:stop] for start, stop in shape.bounds
    )
    slots = slots.view(np.int64)
    slots[num_rows:] = -1
    slots[:num_rows] = rows.slots
    token_ids[num_rows:] = positions[num_rows:] = 0
    token_ids[:num_rows] = rows.token_ids
    lengths[len(spans) :] = starts[len(spans) :] = 0
    cu_rows[len(spans) :] = num_rows
    selected[:] = np.arange(len(selected))
    selected[: len(rows.selected)] = rows.selected
    new[: len(new_blocks)] = new_blocks
    tables = tables.reshape(shape.num_sequences, shape.table_width)
    row = 0
    for index, span in enumerate(spans):
        end = row + span.num_rows
        cu_rows[index], starts[index], lengths[index] = row, span.start_position, span.end_position
        positions[row:end] = np.arange(span.start_position, span.end_position)
        width = len(span.block_table)
        tables[index, :width] = np.frombuffer(array("i", span.block_table), np.int32)
        tables[index, width:] = 0
        row = end
