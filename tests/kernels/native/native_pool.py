"""A block pool as the native kernels lay it out, and steps of one operation on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chatkv.kernels.cpu.native.abi import TILE, KvFormat, Op, OpFlags, OpKind, Pool, Register, Span, Step
from chatkv.kernels.cpu.native.library import native_library
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference import quantise_rows
from chatkv.kernels.reference_attention import SequenceSpan

FORMATS = {torch.float16: KvFormat.FP16, torch.int8: KvFormat.INT8}
GUARD = 24
"""Floats between the rows of a register, which nothing may write to."""
BETWEEN_BLOCKS = 64
"""Bytes."""


class NativePool:
    """All bytes are 0xff at first: NaN as float16 and as float32, so what is not written must not be read."""

    def __init__(self, num_blocks: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        image = TILE * head_dim
        value_bytes = num_layers * 2 * num_kv_heads * image * dtype.itemsize
        scale_bytes = 4 * num_layers * 2 * num_kv_heads * TILE if dtype == torch.int8 else 0
        block_bytes = value_bytes + scale_bytes + BETWEEN_BLOCKS
        self.data = torch.full((num_blocks * block_bytes,), 255, dtype=torch.uint8)
        self.dtype = dtype
        self.struct = Pool(
            data=self.data.data_ptr(),
            block_bytes=block_bytes,
            scales_offset=value_bytes,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            format=FORMATS[dtype],
        )
        numbers = self.data.view(dtype)
        shape = (num_blocks, num_layers, num_kv_heads, TILE, head_dim)
        outer = (block_bytes // dtype.itemsize, 2 * num_kv_heads * image, image)
        scales: list[Tensor | None] = [None, None]
        if scale_bytes:
            floats = self.data.view(torch.float32)
            strides = (block_bytes // 4, 2 * num_kv_heads * TILE, TILE, 1)
            scales = [
                floats.as_strided(shape[:4], strides, value_bytes // 4 + part * num_kv_heads * TILE) for part in (0, 1)
            ]
        self.blocks = KVBlocks(
            numbers.as_strided(shape, (*outer, 1, TILE)),
            numbers.as_strided(shape, (*outer, head_dim, 1), num_kv_heads * image),
            *scales,
        )

    def write(self, layer: int, block_table: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """keys, values: float32 [n, num_kv_heads, head_dim] of positions 0 .. n - 1."""
        positions = torch.arange(len(keys))
        blocks, offsets = torch.tensor(block_table)[positions // TILE], positions % TILE
        for pool, scales, numbers in (
            (self.blocks.keys, self.blocks.key_scales, keys),
            (self.blocks.values, self.blocks.value_scales, values),
        ):
            if scales is None:
                pool[blocks, layer, :, offsets] = numbers.half()
            else:
                pool[blocks, layer, :, offsets], scales[blocks, layer, :, offsets] = quantise_rows(numbers)


def attend(
    queries: Tensor,
    pool: NativePool,
    spans: Sequence[SequenceSpan],
    layer: int = 0,
    window: int | None = None,
    variant: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """float32 [T, num_heads, head_dim] -> same. The kernels take queries that are scaled already."""
    num_rows, num_heads, head_dim = queries.shape
    source = torch.full((num_rows, queries[0].numel() + GUARD), torch.nan)
    source[:, :-GUARD] = queries.flatten(1)
    target = torch.full((num_rows, queries[0].numel() + GUARD), torch.nan)
    tables = [torch.tensor(span.block_table, dtype=torch.int32) for span in spans]
    structs, first_row = [], 0
    for span, table in zip(spans, tables, strict=True):
        structs.append(Span(table.data_ptr(), first_row, span.num_rows, span.start_position))
        first_row += span.num_rows
    op = Op(kind=OpKind.ATTENTION, source=1, target=2, layer=layer, window=window or 0)
    step = Step(
        spans=(Span * len(structs))(*structs),
        num_spans=len(structs),
        num_rows=num_rows,
        num_heads=num_heads,
        pool=pool.struct,
    )
    step.registers[1] = Register(source.data_ptr(), source.stride(0))
    step.registers[2] = Register(target.data_ptr(), target.stride(0))
    _run(step, op, variant, num_threads)
    assert bool(target[:, -GUARD:].isnan().all())
    return target[:, :-GUARD].unflatten(1, (num_heads, head_dim))


def rope_store(
    heads: Tensor,
    pool: NativePool,
    slots: Sequence[int],
    layer: int = 0,
    scale: float = 1.0,
    angles: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    variant: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """float32 [T, num_heads + 2 * num_kv_heads, head_dim] -> the same after the operation; K and V are in the pool.

    angles: cos and sin, float32 [T, head_dim / 2]; weight: float32 [num_heads + num_kv_heads, head_dim].
    """
    num_rows, num_all, _ = heads.shape
    rows = torch.full((num_rows, heads[0].numel() + GUARD), torch.nan)
    rows[:, :-GUARD] = heads.flatten(1)
    slot_ids = torch.tensor(slots, dtype=torch.int32)
    op = Op(
        kind=OpKind.ROPE_STORE,
        source=1,
        layer=layer,
        weight=None if weight is None else weight.data_ptr(),
        eps=eps,
        flags=OpFlags.NONE if angles is None else OpFlags.HAS_ROPE,
    )
    step = Step(
        slots=slot_ids.data_ptr(),
        cos=None if angles is None else angles[0].data_ptr(),
        sin=None if angles is None else angles[1].data_ptr(),
        num_rows=num_rows,
        num_heads=num_all - 2 * pool.struct.num_kv_heads,
        scale=scale,
        pool=pool.struct,
    )
    step.registers[1] = Register(rows.data_ptr(), rows.stride(0))
    _run(step, op, variant, num_threads)
    assert bool(rows[:, -GUARD:].isnan().all())
    return rows[:, :-GUARD].unflatten(1, heads.shape[1:])


def _run(step: Step, op: Op, variant: str | None, num_threads: int) -> None:
    step.ops = (Op * 1)(op)
    step.num_ops = 1
    native_library().run(step, variant, num_threads)
