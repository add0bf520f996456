"""Sequences in a pool, for tests of attention: scattered blocks, and NaN wherever nobody may look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference import quantise_rows, quantise_rows_fp8
from chatkv.kernels.reference_attention import SequenceSpan, paged_attention
from chatkv.kernels.triton.runtime import ceil_div
from tests.kernels.triton.numbers import BLOCK_SIZE, COMPUTE_DTYPES

LAYER = 1
NO_BLOCK = 1 << 20
"""In tables, where nothing may be looked up: outside of every pool."""
KV_NAMES = ["fp16", "bf16", "int8", "fp8"]
ALL_DTYPES = [(name, compute) for name in KV_NAMES for compute in COMPUTE_DTYPES]


@dataclass
class AttentionCase:
    kv: KVBlocks
    spans: list[SequenceSpan]
    queries: Tensor
    """[T, num_heads, head_dim], rows of a wider matrix."""
    scale: float

    @property
    def tables(self) -> Tensor:
        return self.tables_of_width(max(len(span.block_table) for span in self.spans) + 1)

    def tables_of_width(self, width: int) -> Tensor:
        tables = torch.full((len(self.spans), width), NO_BLOCK, dtype=torch.int32)
        for row, span in zip(tables, self.spans, strict=True):
            row[: len(span.block_table)] = torch.tensor(span.block_table)
        return tables

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([span.end_position for span in self.spans], dtype=torch.int32)

    @property
    def starts(self) -> Tensor:
        return torch.tensor([span.start_position for span in self.spans], dtype=torch.int32)

    @property
    def cu_rows(self) -> Tensor:
        return torch.tensor([0] + [span.num_rows for span in self.spans]).cumsum(0).int()

    @property
    def max_rows(self) -> int:
        return max(span.num_rows for span in self.spans)

    def expected(self, window: int | None = None, soft_cap: float | None = None) -> Tensor:
        """Of rows that belong to a sequence."""
        spans = [span for span in self.spans if span.num_rows]
        queries = self.queries[: sum(span.num_rows for span in spans)].float()
        return paged_attention(queries, self.kv, LAYER, spans, self.scale, window, soft_cap)

    def rows_of(self, sequence: int) -> slice:
        first = int(self.cu_rows[sequence])
        return slice(first, first + self.spans[sequence].num_rows)


def attention_case(
    spans: Sequence[tuple[int, int]],
    kv_name: str = "fp16",
    compute: torch.dtype = torch.float16,
    head_dim: int = 64,
    group: int = 2,
    num_kv_heads: int = 2,
    num_extra_rows: int = 0,
    pool: Tensor | None = None,
    block_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> AttentionCase:
    """spans: (start position, number of rows) of each sequence. seeds: one a sequence, by default its place; those of
    one seed have the same numbers at the same positions, in every case."""
    layout = KVLayout(LAYER + 1, num_kv_heads, head_dim, kv_name)
    counts = [ceil_div(start + rows, BLOCK_SIZE) for start, rows in spans]
    generator = torch.Generator().manual_seed(len(spans))
    if block_ids is None:
        block_ids = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    if pool is None:
        pool = layout.new_pool(sum(counts) + 3, torch.device("cpu"))
    kv = layout.views(pool)
    if pool.numel() < 1 << 30:
        for numbers in (kv.keys, kv.values) if kv.key_scales is None else (kv.key_scales, kv.value_scales):
            assert numbers is not None
            numbers.fill_(math.nan)
    sequences, queries, first = [], [], 0
    width = (num_kv_heads * group + 2) * head_dim
    for (start, rows), count, seed in zip(spans, counts, seeds or range(len(spans)), strict=True):
        table = list(block_ids[first : first + count])
        first += count
        write_rows(kv, table, start + rows, seed)
        sequences.append(SequenceSpan(rows, start, table))
        queries.append(_random(start + rows, width, seed=3 * seed + 2)[start:])
    queries.append(torch.full((num_extra_rows, width), math.nan))
    heads = torch.cat(queries).to(compute).unflatten(1, (-1, head_dim))
    return AttentionCase(kv, sequences, heads[:, : num_kv_heads * group], head_dim**-0.5)


def write_rows(kv: KVBlocks, table: Sequence[int], length: int, seed: int) -> None:
    """Random K and V at positions 0 .. length - 1: a longer sequence begins with the numbers of a shorter one."""
    positions = torch.arange(length)
    blocks, offsets = torch.tensor(table, dtype=torch.int64)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
    num_kv_heads, head_dim = kv.keys.shape[2], kv.keys.shape[-1]
    for part, (pool, scales) in enumerate(((kv.keys, kv.key_scales), (kv.values, kv.value_scales))):
        numbers = _random(length, num_kv_heads, head_dim, seed=3 * seed + part) * (1 + positions % 3).view(-1, 1, 1)
        if scales is None:
            pool[blocks, LAYER, :, offsets] = numbers.to(pool.dtype)
        else:
            quantise = quantise_rows if pool.dtype == torch.int8 else quantise_rows_fp8
            pool[blocks, LAYER, :, offsets], scales[blocks, LAYER, :, offsets] = quantise(numbers)


def poison(case: AttentionCase, sequence: int, position: int, part: str) -> None:
    """NaN in what one KV head has of one position: `part` is "keys" or "values"."""
    block = case.spans[sequence].block_table[position // BLOCK_SIZE]
    scales = getattr(case.kv, f"{part.removesuffix('s')}_scales")
    numbers = getattr(case.kv, part)
    if scales is None:
        numbers[block, LAYER, 0, position % BLOCK_SIZE, 3] = math.nan
    else:
        scales[block, LAYER, 0, position % BLOCK_SIZE] = math.nan


def _random(*shape: int, seed: int) -> Tensor:
    """Rows are drawn one after another: more rows begin with the same numbers."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 4 - 2
