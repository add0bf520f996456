"""Attention over block tables, in plain torch: the specification of the paged operations.

`kv`: `KVBlocks`, any strides; quantised K and V have a scale per position and KV head.
A sequence's position p lives in block `block_table[p // block_size]` at offset p % block_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_blocks import KVBlocks
from .reference import dequantise_rows, quantise_rows, quantise_rows_fp8


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """The rows of one sequence in a step. Rows of a step are laid out sequence after sequence."""

    num_rows: int
    start_position: int
    """Absolute position of the first row; the rest follow."""
    block_table: Sequence[int]
    """Blocks of positions 0 .. start_position + num_rows - 1, in order."""

    @property
    def end_position(self) -> int:
        return self.start_position + self.num_rows


def kv_write(kv: KVBlocks, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, num_kv_heads, head_dim] at `slots` (int64 [T]: block * block_size + offset).

    A negative slot is skipped. Keys come after RoPE. float16 and bfloat16 pools get the nearest number, int8 pools
    quanta and scales by `quantise_rows`, uint8 pools bytes and scales by `quantise_rows_fp8`.
    """
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, kv.block_size)
        for pool, pool_scales, numbers in (
            (kv.keys, kv.key_scales, keys[row]),
            (kv.values, kv.value_scales, values[row]),
        ):
            if pool_scales is None:
                pool[block, layer, :, offset] = numbers
            else:
                quantise = quantise_rows_fp8 if pool.dtype == torch.uint8 else quantise_rows
                pool[block, layer, :, offset], pool_scales[block, layer, :, offset] = quantise(numbers)


def paged_attention(
    queries: Tensor,
    kv: KVBlocks,
    layer: int,
    sequences: Sequence[SequenceSpan],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """float32 [T, num_heads, head_dim] -> same. Row at position p sees positions p - window + 1 .. p of its sequence.

    K and V are read as stored in the blocks, the step's own rows too (written before). Query head h reads KV head
    h // (num_heads / num_kv_heads). soft_cap: scores become soft_cap * tanh(score / soft_cap).
    """
    outputs = []
    row = 0
    for span in sequences:
        keys = _numbers(kv.keys, kv.key_scales, layer, span)
        values = _numbers(kv.values, kv.value_scales, layer, span)
        group = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries[row : row + span.num_rows] * scale, keys)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(span.start_position, span.end_position).unsqueeze(1)
        distance = query_positions - torch.arange(span.end_position)
        is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        weights = torch.softmax(scores.masked_fill(is_hidden, float("-inf")), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        row += span.num_rows
    return torch.cat(outputs)


def _numbers(pool: Tensor, scales: Tensor | None, layer: int, span: SequenceSpan) -> Tensor:
    """float32 [end_position, num_kv_heads, head_dim]: the K or V of a sequence as they are stored."""
    blocks = list(span.block_table)
    stored = pool[blocks, layer]
    numbers = stored.float() if scales is None else dequantise_rows(stored, scales[blocks, layer])
    return numbers.transpose(1, 2).flatten(0, 1)[: span.end_position]
