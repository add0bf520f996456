"""Sampling kernels draw what the specification draws, but where its own border is nearer than float32 can tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from chatkv.kernels import sampling_reference as reference
from chatkv.kernels.triton.draw_settings import DrawSettings, farthest_rank, scale_of
from chatkv.kernels.triton.logit_changes import LogitChanges, change_logits
from chatkv.kernels.triton.logprobs import raw_logprobs
from chatkv.kernels.triton.sampling import BORDER_ROUNDINGS, draw_tokens
from tests.kernels.triton import near_draws

BOUND = BORDER_ROUNDINGS * 2.0**-24


@dataclass(frozen=True)
class Draw:
    """One row's settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    allowed: frozenset[int] | None = None
    """None: all."""


def words_of(allowed: frozenset[int], vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def settings_of(draws: list[Draw], vocab_size: int, logit_rows: list[int] | None = None) -> DrawSettings:
    masked = [draw.allowed for draw in draws if draw.allowed is not None]
    numbers: list[list[int]] = []
    for row, draw in enumerate(draws):
        mask_row = sum(other.allowed is not None for other in draws[:row]) if draw.allowed is not None else -1
        source = row if logit_rows is None else logit_rows[row]
        numbers.append([source, -1, mask_row, draw.top_k if draw.top_k < vocab_size else 0, farthest_rank(draw.min_p)])
    factors = [[scale_of(draw.temperature), draw.top_p, draw.uniform] for draw in draws]
    masks = [torch.from_numpy(words_of(allowed, vocab_size)) for allowed in masked]
    return DrawSettings(
        torch.tensor(numbers, dtype=torch.int32),
        torch.tensor(factors, dtype=torch.float64),
        torch.stack(masks) if masks else torch.empty((0, -(-vocab_size // 32)), dtype=torch.int32),
        has_top_k=any(number[3] for number in numbers),
        has_top_p=any(draw.top_p < 1.0 for draw in draws),
        has_min_p=any(draw.min_p > 0.0 for draw in draws),
    )


def run(
    logits: Tensor, draws: list[Draw], tile: int, vocab_size: int | None = None, logit_rows: list[int] | None = None
) -> tuple[list[int], list[int]]:
    """(token ids, are finite)"""
    vocab_size = vocab_size or logits.shape[1]
    token_ids, are_finite = torch.full((2, len(draws)), -1, dtype=torch.int32)
    settings = settings_of(draws, vocab_size, logit_rows)
    draw_tokens(logits, torch.empty((0, vocab_size)), settings, vocab_size, token_ids, are_finite, tile)
    return token_ids.tolist(), are_finite.tolist()


def banned(row: Tensor, draw: Draw) -> Tensor:
    if draw.allowed is None:
        return row.double()
    return reference.bias_and_ban(row.double(), {}, frozenset(range(len(row))) - draw.allowed)


def filters_of(draw: Draw) -> tuple[float, int, float, float, float]:
    return draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.uniform


def by_reference(row: Tensor, draw: Draw) -> int:
    return near_draws.draw(banned(row, draw), *filters_of(draw))


def is_allowed(row: Tensor, draw: Draw, token_id: int) -> bool:
    return near_draws.may_draw(token_id, banned(row, draw), *filters_of(draw), bound=BOUND)


def random_draw(random: Random, vocab_size: int) -> Draw:
    has_mask = random.random() < 0.2
    return Draw(
        temperature=random.choice([0.0, 1e-3, 0.3, 0.8, 1.0, 2.0]),
        top_k=random.choice([0, 0, 1, 2, 7, 36, 900]),
        top_p=random.choice([1.0, 1.0, 1e-6, 0.1003, 0.5007, 0.9001, 0.9991]),
        min_p=random.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 0.99]),
        uniform=random.random(),
        allowed=frozenset(random.sample(range(vocab_size), vocab_size // 3)) if has_mask else None,
    )


@pytest.mark.parametrize(
    ("vocab_size", "tile", "scale"),
    [
        (37, 16, 1.0),
        (1000, 512, 8.0),
        (1000, 1024, 0.01),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(37, 64, 0.01), (37, 64, 8.0), (1000, 256, 1.0), (5000, 1024, 1.0), (5000, 512, 8.0)]
        ),
    ],
)
def test_every_mix_of_filters_draws_what_the_specification_draws(vocab_size: int, tile: int, scale: float) -> None:
    random = Random(vocab_size + tile)
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(tile)) * scale
    draws = [random_draw(random, vocab_size) for _ in logits]
    drawn, are_finite = run(logits, draws, tile)
    assert are_finite == [1] * len(draws)
    wrong = [
        (row, draws[row]) for row, token_id in enumerate(drawn) if not is_allowed(logits[row], draws[row], token_id)
    ]
    assert not wrong
    exact = sum(by_reference(row, draw) == token_id for row, draw, token_id in zip(logits, draws, drawn, strict=True))
    assert exact >= len(draws) - 1, "the bound is for rare rows"


@pytest.mark.parametrize("tile", [32, pytest.param(16, marks=pytest.mark.slow)])
def test_ties_are_cut_where_the_specification_cuts_them(tile: int) -> None:
    random = Random(tile)
    logits = torch.randint(-8, 8, (30, 50), generator=torch.Generator().manual_seed(tile)) / 2.0
    draws = [random_draw(random, 50) for _ in logits]
    drawn, _ = run(logits, draws, tile)
    assert drawn == [by_reference(row, draw) for row, draw in zip(logits, draws, strict=True)]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (Draw(top_k=19), range(19)),  # over the border of a tile
        (Draw(top_k=16), range(16)),
        (Draw(top_p=0.05), range(3)),  # 3 of 50 equal ids make 6 %
        (Draw(top_k=40, top_p=0.51), range(21)),  # shares of what top-k has left
        (Draw(top_k=30, allowed=frozenset(range(10, 50, 2))), range(10, 50, 2)),
        (Draw(top_k=5, allowed=frozenset(range(10, 50, 2))), range(10, 20, 2)),
    ],
)
def test_of_equal_ids_the_lowest_stay(filters: Draw, kept: range) -> None:
    draws = [replace(filters, uniform=(index + 0.5) / len(kept)) for index in range(len(kept))]
    drawn, _ = run(torch.zeros(len(draws), 50), draws, 16)
    assert drawn == list(kept)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(3, 50)
    logits[0, [41, 20, 30]] = 2.5
    logits[1] = -7.0
    logits[2, 49] = 1e-30
    assert run(logits, [Draw(temperature=0.0)] * 3, 16)[0] == [20, 0, 49]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("filters", [Draw(), Draw(top_k=20), Draw(top_p=0.8)])
def test_beside_a_border_the_pick_is_exact(filters: Draw, temperature: float) -> None:
    """Twice the bound away from where one id ends and the next begins."""
    row = torch.randn(100, generator=torch.Generator().manual_seed(8)) * 3
    filters = replace(filters, temperature=temperature)
    probabilities = reference.distribution(row.double(), temperature, filters.top_k, filters.top_p, 0.0)
    ends = torch.cumsum(probabilities, 0)
    ids = [token_id for token_id in range(100) if probabilities[token_id] > 5 * BOUND][:-1]
    ids = ids[:: max(1, len(ids) // 5)]
    draws = [
        replace(filters, uniform=float(ends[token_id]) + side) for side in (-2 * BOUND, 2 * BOUND) for token_id in ids
    ]
    drawn, _ = run(row.expand(len(draws), -1), draws, 64)
    assert drawn[: len(ids)] == ids
    assert drawn[len(ids) :] == [by_reference(row, draw) for draw in draws[len(ids) :]]
    assert all(first < second for first, second in zip(ids, drawn[len(ids) :], strict=True))


@pytest.mark.parametrize("filters", [Draw(top_k=40), Draw(top_p=0.9)])
def test_ids_at_the_border_lie_among_better_ones(filters: Draw) -> None:
    """One of them too many or too few would move where the later ids begin."""
    row = torch.tensor([0.0, 1.0] * 25)
    ends = torch.cumsum(reference.distribution(row.double(), 1.0, filters.top_k, filters.top_p, 0.0), 0)
    ids = [9, 29, 35, 43, 47]
    draws = [replace(filters, uniform=float(ends[i]) + side) for i in ids for side in (-2 * BOUND, 2 * BOUND)]
    drawn, _ = run(row.expand(len(draws), -1), draws, 32)
    assert drawn == [by_reference(row, draw) for draw in draws]
    assert drawn[::2] == ids


@pytest.mark.parametrize("filters", [Draw(), Draw(top_k=2), Draw(top_p=0.9), Draw(allowed=frozenset({20, 40}))])
def test_the_ends_of_the_range_draw_the_first_and_the_last(filters: Draw) -> None:
    """Tiles before and behind have nothing."""
    row = torch.full((50,), -torch.inf)
    row[[20, 40]] = torch.tensor([0.0, 1.0])
    draws = [replace(filters, uniform=uniform) for uniform in (0.0, 1.0 - 2.0**-53)]
    assert run(row.expand(2, -1), draws, 16)[0] == [20, 40] == [by_reference(row, draw) for draw in draws]


def test_a_row_is_drawn_alike_alone_and_in_any_company() -> None:
    random = Random(4)
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(4)) * 2
    draws = [random_draw(random, 200) for _ in logits]
    together, _ = run(logits, draws, 64)
    assert together == [run(logits[row : row + 1], [draw], 64)[0][0] for row, draw in enumerate(draws)]
    order = list(range(6))
    random.shuffle(order)
    assert run(logits[order], [draws[row] for row in order], 64)[0] == [together[row] for row in order]


FILTERS = [Draw(), Draw(temperature=0.0), Draw(top_k=5, top_p=0.9, min_p=0.01), Draw(allowed=frozenset(range(7)))]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 36])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(bad: float, column: int) -> None:
    logits = torch.randn(2 * len(FILTERS), 37, generator=torch.Generator().manual_seed(6))
    expected, _ = run(logits, FILTERS * 2, 16)
    logits[: len(FILTERS), column] = bad
    drawn, are_finite = run(logits, FILTERS * 2, 16)
    assert are_finite == [0] * len(FILTERS) + [1] * len(FILTERS)
    assert drawn[len(FILTERS) :] == expected[len(FILTERS) :]
    assert all(0 <= token_id < 37 for token_id in drawn)


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.full((12, 50), -torch.inf)
    logits[:, [5, 40]] = 0.0
    draws = [replace(FILTERS[row % 3], uniform=row / 12) for row in range(12)]
    drawn, are_finite = run(logits, draws, 16)
    assert set(drawn) == {5, 40}
    assert are_finite == [0] * 12
    drawn, _ = run(torch.full((4, 50), -torch.inf), FILTERS, 16)
    assert all(0 <= token_id < 50 for token_id in drawn)


def test_a_mask_that_leaves_nothing_is_no_mask() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(9))
    logits[4:, :10] = -torch.inf
    empty, impossible = frozenset[int](), frozenset(range(10))
    filters = [Draw(temperature=0.0), Draw(), Draw(top_k=3), Draw(top_p=0.5, min_p=0.1)]
    draws = [replace(draw, allowed=empty) for draw in filters] + [replace(draw, allowed=impossible) for draw in filters]
    drawn, _ = run(logits, draws, 16)
    assert drawn == [by_reference(row, draw) for row, draw in zip(logits, draws, strict=True)]
    assert drawn == [by_reference(row, draw) for row, draw in zip(logits, filters * 2, strict=True)]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 2.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_values_draw_the_right_id(temperature: float, scale: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * scale
    filters = [Draw(), Draw(top_k=5), Draw(top_p=0.3), Draw(min_p=0.2)]
    draws = [replace(draw, temperature=temperature) for draw in filters]
    assert run(logits, draws, 16)[0] == [by_reference(row, draw) for row, draw in zip(logits, draws, strict=True)]


def test_several_tokens_of_one_row_and_columns_beyond_the_vocabulary() -> None:
    wide = torch.randn(3, 60, generator=torch.Generator().manual_seed(10))
    wide[:, 45:] = 100.0
    before = wide.clone()
    draws = [Draw(uniform=uniform, top_k=20) for uniform in (0.1, 0.6, 0.9, 0.3)]
    sources = [2, 0, 2, 2]
    drawn, _ = run(wide, draws, 16, vocab_size=45, logit_rows=sources)
    assert drawn == [by_reference(wide[row, :45], draw) for row, draw in zip(sources, draws, strict=True)]
    assert torch.equal(wide, before)


def test_changes_are_those_of_the_specification_rounded_once() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(11)) * 10
    logits[2, [3, 44]], logits[0, 3] = torch.tensor([6.5, -6.5]), -0.3
    ids = torch.tensor([3, 44, 7, 3, 0, 12], dtype=torch.int32)
    penalties = torch.tensor([1.3, 1.3, 1.3, 0.7, 1.0, 1.0], dtype=torch.float64)
    subtracted = torch.tensor([0.0, 0.7, -100.0, 0.1, 1e-3, 2.0], dtype=torch.float64)
    changes = LogitChanges(
        torch.tensor([2, 0]), torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32), ids, penalties, subtracted
    )
    expected = logits[[2, 0], :45].double()
    for row, part in enumerate((slice(0, 3), slice(3, 6))):
        at = ids[part].long()
        values = expected[row, at]
        values = torch.where(values > 0, values / penalties[part], values * penalties[part])
        expected[row, at] = values - subtracted[part]
    assert torch.equal(change_logits(logits, changes, 45), expected.float())


@pytest.mark.parametrize("num_top", [0, 4, 20])
def test_logprobs_are_those_of_the_model(num_top: int) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(12)) * 5
    logits[0, [10, 40]] = logits[0, :64].max() + 1.0  # equals, in two tiles
    logits[1, [8, 50]] = torch.tensor([-0.0, 0.0])
    logits[1, [i for i in range(70) if i not in (8, 50)]] -= 100.0
    logits[:, 64:] = 1000.0  # beyond the vocabulary
    logit_rows, drawn_rows = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0, 4, 3])
    token_ids = torch.tensor([50, 3, 9, 63, 0], dtype=torch.int32)
    drawn, top_ids = torch.empty(4), torch.empty((4, num_top), dtype=torch.int32)
    top = torch.empty((4, num_top))
    raw_logprobs(logits, logit_rows, drawn_rows, token_ids, 64, drawn, top_ids, top, tile=16)
    for index, (row, source) in enumerate(zip(logit_rows, drawn_rows, strict=True)):
        expected = reference.raw_logprobs(logits[row, :64].double())
        assert drawn[index].item() == pytest.approx(expected[token_ids[source]].item(), abs=1e-5, rel=1e-6)
        order = torch.argsort(expected, descending=True, stable=True)[:num_top]
        assert top_ids[index].tolist() == order.tolist()
        assert top[index].tolist() == pytest.approx(expected[order].tolist(), abs=1e-5, rel=1e-6)
