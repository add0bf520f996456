"""Every operation in plain torch: the specification that backends are tested against.

Written to be read, not to be fast. T is the number of tokens (rows) of a step; rows belong to any mix of sequences.
Activations are float32. Attention is in `reference_attention.py`, the sampler's maths in `sampling_reference.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kv_blocks import LARGEST_QUANTUM
from .tile_layout import untile
from .weights import (
    INT4_ZERO_POINT,
    BnbInt8Weight,
    Fp8Weight,
    FpWeight,
    Int4Weight,
    Int8Weight,
    Nf4Weight,
    TiledWeight,
    Weight,
)

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max
NF4_NUMBERS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the quanta of NF4 stand for (arXiv:2305.14314, appendix E)."""
BNB_INT8_STEP = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""


def dequantise(weight: Weight) -> Tensor:
    """float32 [num_rows, num_columns]; each product and sum rounded to float32, as GGUF defines it."""
    match weight:
        case FpWeight(values):
            return values.float()
        case Int8Weight(quanta, scales):
            return (quanta.float() * scales.float().unsqueeze(-1)).flatten(1)
        case Int4Weight(quanta, scales, minimums):
            columns = torch.cat((quanta & 0x0F, quanta >> 4), dim=-1)
            scale = scales.float().unsqueeze(-1)
            if minimums is None:
                return (scale * (columns.to(torch.int8) - INT4_ZERO_POINT).float()).flatten(1)
            return (scale * columns.float() + minimums.float().unsqueeze(-1)).flatten(1)
        case Fp8Weight(values, scales):
            return values.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)
        case Nf4Weight(quanta, scales):
            columns = torch.stack((quanta >> 4, quanta & 0x0F), dim=-1).view(*scales.shape, -1)
            numbers = torch.tensor(NF4_NUMBERS, device=quanta.device)[columns.int()]
            return (numbers * scales.unsqueeze(-1)).flatten(1)
        case BnbInt8Weight(quanta, scales):
            return quanta.float() * scales.unsqueeze(-1) * BNB_INT8_STEP
        case TiledWeight():
            return dequantise(untile(weight))


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """[T, num_columns] -> [T, num_rows]: x times the transposed weight, plus bias [num_rows]."""
    y = x @ dequantise(weight).T
    return y if bias is None else y + bias


def embedding(token_ids: Tensor, weight: Weight) -> Tensor:
    """int64 [T] -> float32 [T, hidden_size]: rows of the table."""
    return dequantise(weight)[token_ids]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] -> same: x / sqrt(mean(x^2) + eps) * weight, over the last dimension (arXiv:1910.07467).

    QK-norm is this over head_dim: x [T, num_heads, head_dim], weight [head_dim] or [num_heads, head_dim].
    """
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, num_heads, head_dim] rotated by its position (arXiv:2104.09864); halves paired as (i, i + head_dim / 2).

    cos, sin: [T, head_dim / 2], the attention factor of the scaling scheme included.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., n] -> int8 [..., n] and float32 scales [...]: row = quanta * scale, symmetric, one scale a row.

    scale = largest magnitude / 127, at least the smallest normal number, so that a row of zeros is safe; quanta are
    rounded to the nearest, ties to even. A row that is not finite has a scale that is not finite, and any quanta: what
    reads it is not finite either.
    """
    scales = torch.linalg.vector_norm(rows, float("inf"), dim=-1).div_(LARGEST_QUANTUM).clamp_min_(SMALLEST_SCALE)
    return (rows / scales.unsqueeze(-1)).round_().to(torch.int8), scales


def quantise_rows_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., n] -> uint8 [..., n], the bits of e4m3fn, and float32 scales [...]: row = numbers * scale.

    scale = largest magnitude / 448, at least the smallest normal number; numbers are rounded to the nearest e4m3fn,
    ties to even. Rows that are not finite as in `quantise_rows`.
    """
    scales = torch.linalg.vector_norm(rows, float("inf"), dim=-1).div_(LARGEST_E4M3).clamp_min_(SMALLEST_SCALE)
    return (rows / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise_rows(quanta: Tensor, scales: Tensor) -> Tensor:
    """int8, or uint8 e4m3fn, [..., n] and float32 [...] -> float32 [..., n], each product rounded to float32."""
    numbers = quanta.view(torch.float8_e4m3fn) if quanta.dtype == torch.uint8 else quanta
    return numbers.float() * scales.unsqueeze(-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> [T, n]: silu of the first half times the second (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * n] -> [T, n]: gelu of the first half, in its tanh form (arXiv:1606.08415), times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def head(hidden: Tensor, norm_weight: Tensor, eps: float, weight: Weight) -> Tensor:
    """[num_samples, hidden_size] -> float32 logits [num_samples, vocab_size], for the rows that are sampled only."""
    return linear(rms_norm(hidden, norm_weight, eps), weight)
