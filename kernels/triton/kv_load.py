"""K and V of a tile of positions as attention multiplies them, and one step of its softmax. Device functions.

Quantised K and V enter the matrix units as their quanta, which are exact in 16 bits. A key's scale multiplies its
scores. A value's scale multiplies its weights, of which the largest must stay near 1 in float16: so the running maximum
is that of score + log2(scale). Maximum, weights and total share that unit, and it cancels in the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kv_blocks import KVBlocks
from .runtime import HALVES

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)
"""Below every score: the maximum of no positions. Finite, so that it can be subtracted from itself."""
SMALLEST_UNIT = tl.constexpr(2.0**-60)
"""Of values, in the running maximum: a row of zeros has the smallest scale there is, and 1 / scale must be summed."""


@triton.jit
def to_compute(stored, CDT: tl.constexpr):
    """What the pool holds -> CDT, exact (a float of the other 16-bit kind is rounded). uint8 is e4m3fn, and comes out
    divided by `value_unit`."""
    if stored.dtype == tl.uint8:
        # Exponent and mantissa are moved to where the other float has them; the sign, spread over the high byte, is
        # left at its own place only.
        byte = stored.to(tl.int8, bitcast=True).to(tl.int16)
        if tl.float16 == CDT:
            return ((byte << 7) & ~0x4000).to(tl.float16, bitcast=True)
        else:
            # The exponents' biases differ by 120: as it is, the matrix units would lose products that small.
            return ((byte << 4) & ~0x7800).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    elif stored.dtype == tl.int8:
        byte = stored.to(tl.uint8, bitcast=True).to(tl.uint16)
        if tl.float16 == CDT:
            # 0x6400 is 1024, whose last place is 1; the sign bit turned makes quanta offsets from -128.
            return (0x6400 | (byte ^ 0x80)).to(tl.float16, bitcast=True) - 1152.0
        else:
            # 0x4300 is 128, whose last place is 1, and 0x4380 is 256: the low 7 bits less 0 or 128.
            low = (0x4300 | (byte & 0x7F)).to(tl.bfloat16, bitcast=True)
            return low - (0x4300 | (byte & 0x80)).to(tl.bfloat16, bitcast=True)
    else:
        return stored.to(CDT)


@triton.jit
def load_tile(
    pool,
    scales,
    positions,
    is_there,
    CDT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """K and V of one layer and KV head at `positions` [keys], gathered through the block table.

    pool: keys, values, the sequence's row of the table, the offset of layer and head in a block, strides of blocks and
    positions. scales: of keys, of values, offset of layer and head, stride of blocks. -> two CDT [keys, dims], and two
    float32 [keys] of scales, 1 where not HAS_SCALES; zeros where is_there [keys] is not. IS_WHOLE: it is everywhere.
    """
    keys, values, table, offset, block_stride, position_stride = pool
    dims = tl.arange(0, PADDED_DIM)
    is_number = (dims < HEAD_DIM)[None, :]
    if IS_WHOLE:
        blocks = tl.load(table + positions // BLOCK).to(tl.int64)
    else:
        is_number = is_number & is_there[:, None]
        blocks = tl.load(table + positions // BLOCK, mask=is_there, other=0).to(tl.int64)
    rows = blocks * block_stride + offset + positions % BLOCK * position_stride
    numbers = rows[:, None] + dims[None, :]
    key = to_compute(tl.load(keys + numbers, mask=is_number, other=0), CDT)
    value = to_compute(tl.load(values + numbers, mask=is_number, other=0), CDT)
    key_scale = tl.full(positions.shape, 1.0, tl.float32)
    value_scale = key_scale
    if HAS_SCALES:
        key_scales, value_scales, scale_offset, scale_block_stride = scales
        scale_rows = blocks * scale_block_stride + scale_offset + positions % BLOCK
        key_scale = tl.load(key_scales + scale_rows, mask=is_there, other=0.0)
        value_scale = tl.load(value_scales + scale_rows, mask=is_there, other=0.0)
    return key, value, key_scale, value_scale


@triton.jit
def to_scores(products, score_scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """q times k, float32 -> scores in units of log2; the arguments are those of `score_factors`."""
    scores = products * score_scale
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit
def attend_tile(
    scores,
    values,
    value_scales,
    is_seen,
    maximum,
    total,
    attended,
    HAS_SCALES: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
):
    """One tile of the online softmax (arXiv:2205.14135): the new maximum, total and attended.

    scores float32 [rows, keys]: -inf where is_seen [rows or 1, keys] is not, which is read where HAS_HIDDEN; values
    CDT [keys, dims]; value_scales float32 [keys] where HAS_SCALES; maximum and total float32 [rows]; attended float32
    [rows, dims]. A tile of which a row sees nothing leaves that row's bits as they were.
    """
    if HAS_SCALES:
        largest = tl.max(scores + tl.log2(tl.maximum(value_scales, SMALLEST_UNIT))[None, :], axis=1)
    else:
        largest = tl.max(scores, axis=1)
    new_maximum = tl.maximum(maximum, largest)
    shrink = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    if HAS_SCALES:
        weights *= value_scales[None, :]
        if HAS_HIDDEN:
            # A hidden scale may be NaN.
            weights = tl.where(is_seen, weights, 0.0)
    attended = tl.dot(weights.to(values.dtype), values, attended * shrink[:, None])
    return new_maximum, total, attended


def value_unit(stored: torch.dtype, compute: torch.dtype) -> float:
    """What a number of `to_compute` must be multiplied with."""
    return 256.0 if stored == torch.uint8 and compute == torch.float16 else 1.0


def score_factors(scale: float, unit: float, soft_cap: float | None) -> tuple[float, float]:
    """scale: of queries; unit: of keys. `score_scale` and `soft_cap` of `to_scores`."""
    if soft_cap is None:
        return scale * unit * LOG2_E, 0.0
    return 2.0 * LOG2_E * scale * unit / soft_cap, soft_cap * LOG2_E


def check_blocks(kv: KVBlocks, queries: torch.Tensor) -> None:
    """That `kv` is laid out as the attention kernels read it, and that queries [..., num_heads, head_dim] fit."""
    num_heads, head_dim = queries.shape[-2:]
    keys, scales = kv.keys, kv.key_scales
    assert keys.stride() == kv.values.stride(), "K and V are read with the same strides"
    assert keys.stride(-1) == 1, "the numbers of a position must lie together: keys by position"
    assert keys.shape[-1] == head_dim, f"queries have {head_dim} dimensions, the pool {keys.shape[-1]}"
    assert num_heads % keys.shape[2] == 0, f"{num_heads} heads over {keys.shape[2]} KV heads"
    assert queries.dtype in HALVES, f"queries are {queries.dtype}, not 16-bit floats"
    assert queries.stride()[-2:] == (head_dim, 1), "a row's heads must lie together"
    if keys.dtype not in (torch.int8, torch.uint8):
        assert keys.dtype in HALVES, f"no kernel reads K and V in {keys.dtype}"
        assert scales is kv.value_scales is None, f"{keys.dtype} has no scales"
        return
    assert scales is not None, f"{keys.dtype} needs a scale a row"
    assert kv.value_scales is not None, f"{keys.dtype} needs a scale a row"
    assert scales.stride() == kv.value_scales.stride(), "scales of K and V are read with the same strides"
    assert scales.stride(-1) == 1, "the scales of a head in a block must lie together"


def check_out(out: torch.Tensor, queries: torch.Tensor) -> None:
    assert out.shape == queries.shape, f"the output is {list(out.shape)}, not {list(queries.shape)}"
    assert out.dtype == queries.dtype, f"the output is {out.dtype}, queries are {queries.dtype}"
    assert out.stride()[1:] == (out.shape[2], 1), "a row's heads must lie together"
