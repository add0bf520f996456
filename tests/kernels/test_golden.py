"""Golden numbers: operations on small integers, where every step is exact, so that any machine gives these bits.

A change here means that stored blocks no longer hold what they held: raise NUMERICS_EPOCH in engine/models/decoder.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from chatkv.engine.models.decoder import NUMERICS_EPOCH
from chatkv.kernels import reference
from chatkv.kernels.cpu.tiles import KEY_TILE, TileProducts, combine
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference_attention import SequenceSpan, paged_attention
from chatkv.kernels.weights import Int4Weight, Int8Weight


def test_epoch_and_tile_are_those_of_the_golden_numbers() -> None:
    assert (NUMERICS_EPOCH, KEY_TILE) == (2, 256)


def test_weights_and_products() -> None:
    quanta = (torch.arange(64) * 7 % 256).to(torch.uint8).view(2, 2, 16)
    scales = torch.tensor([[1.0, 2.0], [0.5, 4.0]]).half()
    minimums = torch.tensor([[-1.0, 0.0], [3.0, -8.0]]).half()
    affine = reference.dequantise(Int4Weight(quanta, scales, minimums))
    assert affine[0, :4].tolist() == [-1.0, 6.0, 13.0, 4.0]
    int8 = Int8Weight(torch.arange(-32, 32, dtype=torch.int8).view(1, 2, 32), torch.tensor([[0.25, 2.0]]).half())
    x = torch.ones(1, 64)
    assert reference.linear(x, int8).item() == -132.0 + 992.0
    by_hand = [
        sum(
            float(scales[row, group]) * ((int(quanta[row, group, byte]) >> shift & 15) - 8)
            for group in (0, 1)
            for byte in range(16)
            for shift in (0, 4)
        )
        for row in (0, 1)
    ]
    assert reference.linear(x, Int4Weight(quanta, scales)).tolist() == [by_hand]


def test_rope_and_norm() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert reference.rope(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
    fours = torch.full((1, 16), 4.0)
    assert reference.rms_norm(fours, torch.full((16,), 3.0), 0.0).tolist() == [[3.0] * 16]
    assert reference.silu_mul(torch.tensor([[0.0, 5.0]])).tolist() == [[0.0]]


def test_rows_of_8_bits() -> None:
    rows = torch.tensor([[254.0, 1.0, 3.0, -5.0, -254.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-127.0, 126.5, 63.5, 0.5, 0.25]])
    quanta, scales = reference.quantise_rows(rows)
    assert quanta.dtype == torch.int8
    assert scales.tolist() == [2.0, reference.SMALLEST_SCALE, 1.0]
    # Halves go to the even neighbour: 0.5 -> 0, 1.5 -> 2, -2.5 -> -2, 126.5 -> 126, 63.5 -> 64.
    assert quanta.tolist() == [[127, 0, 2, -2, -127], [0, 0, 0, 0, 0], [-127, 126, 64, 0, 0]]
    assert reference.dequantise_rows(quanta, scales)[0].tolist() == [254.0, 0.0, 4.0, -4.0, -254.0]


def test_attention_over_equal_scores_is_the_mean_and_over_one_key_its_value() -> None:
    kv = KVBlocks(torch.zeros(4, 1, 1, 16, 2), torch.arange(128.0).view(4, 1, 1, 16, 2))
    span = SequenceSpan(4, 0, [2])
    found = paged_attention(torch.zeros(4, 1, 2), kv, 0, [span], 1.0)
    assert found[[0, 1, 3], 0].tolist() == [[64.0, 65.0], [65.0, 66.0], [67.0, 68.0]]
    assert paged_attention(torch.ones(4, 1, 2), kv, 0, [span], 1.0, window=1)[3, 0].tolist() == [70.0, 71.0]


def test_a_soft_cap_bounds_what_a_score_can_weigh() -> None:
    kv = KVBlocks(torch.zeros(1, 1, 1, 16, 2), torch.zeros(1, 1, 1, 16, 2))
    kv.keys[0, 0, 0, 1] = 1e4
    kv.values[0, 0, 0, 1] = 1.0
    found = paged_attention(torch.ones(1, 1, 2), kv, 0, [SequenceSpan(1, 1, [0])], 1.0, soft_cap=2.0)
    assert found[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-2.0)))  # scores 0 and 2


def test_tiles_join_to_the_mean_of_what_is_seen() -> None:
    products = TileProducts()
    products.row_multiple = 4
    queries = torch.zeros(4, 1, 4, 8)
    keys = torch.zeros(4, 1, KEY_TILE, 8)
    values = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, KEY_TILE, 8).contiguous()
    hidden = torch.zeros(2, 1, 4, KEY_TILE, dtype=torch.bool)
    hidden[:, :, 1:] = True  # Row 0 sees all four tiles, the others two.
    result = products.attend(queries, keys, values, hidden, 2)
    joined = combine(result, torch.zeros(4, dtype=torch.int64), [1, 1, 1, 1])
    assert joined[0, 0, :, 0].tolist() == [1.5, 0.5, 0.5, 0.5]
