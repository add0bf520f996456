"""A digest of what the native library computes: a small model of fixed numbers goes through every operation.

Every instruction set gives the same bits, or should. Were a compiler to break that, the digest would differ, and caches
of the one and the other would not be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

from ...executor import StepRows
from ...kv_blocks import KVBlocks
from ...program import Attend, Embed, Gate, Linear, Norm, Program, ProgramOp, Register, RotateAndStore, Select, Take
from ...reference_attention import SequenceSpan
from ...tile_layout import tile
from ...weights import GROUP_SIZE, Int4Weight, Int8Weight, Weight
from ..digest import DIGEST_BYTES, fixed_numbers
from .abi import KEY_TILE, TILE

HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 64, 96, 48
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 16
NUM_ROWS = KEY_TILE + 12
NUM_BLOCKS = -(-NUM_ROWS // TILE)


def fixed_program() -> Program:
    """Two layers; each weight format, on fine activations and others; with and without bias, QK-norm, RoPE, window."""
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    ops: list[ProgramOp] = [Embed(Register.HIDDEN, _int8(VOCAB_SIZE, HIDDEN_SIZE))]
    for layer, make in enumerate((_int4, _int4_affine)):
        norm, bias = 1 + fixed_numbers(HIDDEN_SIZE) / 4, fixed_numbers(queries + 2 * keys)
        qk_norm = 1 + fixed_numbers(NUM_HEADS + NUM_KV_HEADS, HEAD_DIM) / 4
        qkv = (make(queries, HIDDEN_SIZE), make(keys, HIDDEN_SIZE), make(keys, HIDDEN_SIZE))
        gate_up = (make(INTERMEDIATE_SIZE, HIDDEN_SIZE), make(INTERMEDIATE_SIZE, HIDDEN_SIZE))
        ops += [
            Norm(Register.HIDDEN, norm, 1e-5, is_fine=True),
            Linear(Register.HEADS, qkv, bias if layer else None),
            RotateAndStore(Register.HEADS, layer, qk_norm if layer else None, 1e-5, has_rope=not layer),
            Attend(Register.HEADS, Register.ATTENDED, layer, window=40 if layer else None),
            Take(Register.ATTENDED),
            Linear(Register.HIDDEN, (make(HIDDEN_SIZE, queries),), None, is_added=True),
            Norm(Register.HIDDEN, norm, 1e-5, is_fine=True),
            Linear(Register.GATE_UP, gate_up, None),
            Gate(Register.GATE_UP),
            Linear(Register.HIDDEN, (_int8(HIDDEN_SIZE, INTERMEDIATE_SIZE),), None, is_added=True),
        ]
    ops += [
        Select(Register.HIDDEN, Register.SELECTED),
        Norm(Register.SELECTED, torch.ones(HIDDEN_SIZE), 1e-5, is_fine=True),
        Linear(Register.LOGITS, (_int8(VOCAB_SIZE, HIDDEN_SIZE),), None),
    ]
    return Program(
        ops,
        HIDDEN_SIZE,
        INTERMEDIATE_SIZE,
        VOCAB_SIZE,
        NUM_LAYERS,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        inverse_frequencies=fixed_numbers(HEAD_DIM // 2).abs(),
        attention_factor=1.0,
    )


def digest_of(run: Callable[[StepRows, KVBlocks], Tensor]) -> str:
    """Hexadecimal. `run` runs `fixed_program` and gives its logits."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for is_quantised in (False, True):
        kv = _new_pool(is_quantised)
        token_ids = [7 * row % VOCAB_SIZE for row in range(NUM_ROWS)]
        # Most of it at once, then one row, whose keys are joined from parts.
        for first, end in ((0, NUM_ROWS - 1), (NUM_ROWS - 1, NUM_ROWS)):
            span = SequenceSpan(end - first, first, range(-(-end // TILE)))
            rows = StepRows(token_ids[first:end], range(first, end), [span], range(end - first))
            digest.update(run(rows, kv).contiguous().view(torch.uint8).numpy().data)
        for view in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
            if view is not None:
                digest.update(view.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _new_pool(is_quantised: bool) -> KVBlocks:
    """Empty."""
    dtype = torch.int8 if is_quantised else torch.float16
    heads = (NUM_LAYERS, 2, NUM_KV_HEADS)
    num_numbers, num_scales = math.prod(heads) * TILE * HEAD_DIM, math.prod(heads) * TILE
    values_bytes = num_numbers * dtype.itemsize
    pool = torch.zeros(NUM_BLOCKS, values_bytes + num_scales * 4, dtype=torch.uint8)
    keys, values = pool.view(dtype)[:, :num_numbers].unflatten(1, (*heads, TILE * HEAD_DIM)).unbind(2)
    scales = pool.view(torch.float32)[:, values_bytes // 4 :].unflatten(1, (*heads, TILE)).unbind(2)
    return KVBlocks(
        keys.unflatten(-1, (HEAD_DIM, TILE)).transpose(-1, -2),
        values.unflatten(-1, (TILE, HEAD_DIM)),
        *(scales if is_quantised else ()),
    )


def _int8(num_rows: int, num_columns: int) -> Weight:
    shape = (num_rows, num_columns // GROUP_SIZE)
    return tile(Int8Weight((fixed_numbers(*shape, GROUP_SIZE) * 127).to(torch.int8), _scales(shape) / 8))


def _int4(num_rows: int, num_columns: int) -> Weight:
    shape = (num_rows, num_columns // GROUP_SIZE)
    return tile(Int4Weight(_nibbles(shape), _scales(shape)))


def _int4_affine(num_rows: int, num_columns: int) -> Weight:
    shape = (num_rows, num_columns // GROUP_SIZE)
    return tile(Int4Weight(_nibbles(shape), _scales(shape), -8 * _scales(shape)))


def _scales(shape: tuple[int, int]) -> Tensor:
    return ((2 + fixed_numbers(*shape)) / 64).half()


def _nibbles(shape: tuple[int, int]) -> Tensor:
    return ((fixed_numbers(*shape, GROUP_SIZE // 2) + 1) * 127).to(torch.uint8)
