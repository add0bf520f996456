"""The sampler draws what the specification draws, whatever else is in the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from chatkv.engine.batch import SampleSpec
from chatkv.engine.request import SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.kernels import sampling_reference as reference

VOCAB = 50


def spec(
    sampling: SamplingParams,
    position: int = 0,
    choice: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> SampleSpec:
    return SampleSpec(sampling, choice, position, prompt, output)


def draw(logits: Tensor, *specs: SampleSpec, eos_ids: frozenset[int] = frozenset()) -> list[int]:
    return [token_id for token_id, _ in Sampler(logits.shape[1]).sample(logits, specs, eos_ids)]


def draw_by_reference(row: Tensor, one: SampleSpec, eos_ids: frozenset[int] = frozenset()) -> int:
    sampling = one.sampling
    logits = reference.penalize(
        row.double(),
        one.prompt_token_ids,
        one.output_token_ids,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    banned = eos_ids | sampling.stop_token_ids if one.is_eos_banned else frozenset()
    logits = reference.bias_and_ban(logits, sampling.logit_bias, banned)
    probabilities = reference.distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return reference.pick(probabilities, reference.noise(sampling.seed, one.choice, one.position))


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 1000]),
    # Not a share that some number of equal ids makes exactly: there rounding decides.
    top_p=st.sampled_from([1e-6, 0.1003, 0.5007, 0.9001, 0.9991, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 0.99]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=4),
    seed=st.integers(-(2**63), 2**64 - 1),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=12).map(tuple)
specs = st.builds(SampleSpec, samplings, st.integers(0, 3), st.integers(0, 10_000), ids, ids, st.booleans())
# Coarse values make ties common.
rows = hnp.arrays(np.float32, VOCAB, elements=st.integers(-20, 20).map(lambda value: value / 2))


@settings(max_examples=400, deadline=None)
@given(rows, specs)
def test_every_mix_of_settings_draws_what_the_specification_draws(row: np.ndarray, one: SampleSpec) -> None:
    logits = torch.from_numpy(row)[None]
    assert draw(logits, one, eos_ids=frozenset({3})) == [draw_by_reference(logits[0], one, frozenset({3}))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rows, specs), min_size=2, max_size=6), st.randoms())
def test_a_row_is_drawn_alike_alone_and_in_any_company(
    batch: list[tuple[np.ndarray, SampleSpec]], random: Random
) -> None:
    logits = torch.from_numpy(np.stack([row for row, _ in batch]))
    alone = [draw(logits[index : index + 1], one)[0] for index, (_, one) in enumerate(batch)]
    order = list(range(len(batch)))
    random.shuffle(order)
    together = draw(logits[order], *(batch[index][1] for index in order))
    assert together == [alone[index] for index in order]


@pytest.mark.parametrize("num_ids", [1_000, 150_000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_filters_keep_the_right_ids_of_a_large_vocabulary(num_ids: int, scale: float) -> None:
    logits = torch.randn(1, num_ids, generator=torch.Generator().manual_seed(1)) * scale
    for sampling in (
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9999, temperature=2.0),
        SamplingParams(top_k=500, top_p=0.7, min_p=0.1),
        SamplingParams(),
    ):
        for position in range(2):
            one = spec(sampling, position)
            assert draw(logits, one) == [draw_by_reference(logits[0], one)]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sampling = SamplingParams(repetition_penalty=2.0, logit_bias={1: 5.0}, presence_penalty=1.0)
    draw(logits, spec(sampling, output=(1, 2)), spec(replace(sampling, temperature=0.0), prompt=(3,)))
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 4, 30]] = 2.5
    assert draw(logits, spec(SamplingParams(temperature=0.0))) == [4]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(top_k=3), {0, 1, 2}),
        (SamplingParams(top_p=0.05), {0, 1, 2}),  # 3 of 50 equal ids make 6 %.
        (SamplingParams(top_k=10, top_p=0.15), {0, 1}),  # Shares of what top-k has left.
    ],
)
def test_of_equal_ids_the_lowest_pass_a_filter(sampling: SamplingParams, allowed: set[int]) -> None:
    logits = torch.zeros(200, VOCAB)
    drawn = draw(logits, *(spec(sampling, position) for position in range(200)))
    assert set(drawn) == allowed


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value by the Wilson-Hilferty approximation."""
    degrees = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("varied", ["position", "seed", "choice"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 12, "top_p": 0.9}, {"min_p": 0.1, "temperature": 0.7}])
def test_draws_follow_the_distribution(varied: str, filters: dict[str, float]) -> None:
    num_draws = 20_000
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    base = SamplingParams(seed=11, **filters)  # type: ignore[arg-type]
    many = [
        spec(
            replace(base, seed=number) if varied == "seed" else base,
            number if varied == "position" else 7,
            number if varied == "choice" else 0,
        )
        for number in range(num_draws)
    ]
    counts = np.bincount(draw(row.expand(num_draws, -1), *many), minlength=VOCAB)
    probabilities = reference.distribution(row.double(), base.temperature, base.top_k, base.top_p, base.min_p).numpy()
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    assert chi_square(counts[possible], probabilities[possible] * num_draws) > 1e-4


def test_noise_is_known_numbers() -> None:
    """Golden: a change makes every seeded answer another one."""
    assert [reference.noise(*at) for at in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 2, 3))] == [
        0.13870941014555427,
        0.6935121390102292,
        0.2691303195904541,
        0.18436667429957676,
        0.2815569767288524,
    ]


def test_noise_of_neighbours_is_independent() -> None:
    values = np.array([[reference.noise(seed, 0, position) for position in range(300)] for seed in range(300)])
    for first, second in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values, values.T)):
        off_diagonal = ~np.eye(300, dtype=bool) if first is values else slice(None)
        correlation = np.corrcoef(np.ravel(first[off_diagonal]), np.ravel(second[off_diagonal]))[0, 1]
        assert abs(correlation) < 0.02


def test_bias_of_a_hundred_decides() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 5
    best = int(logits.argmax())
    for position in range(50):
        drawn = draw(logits, spec(SamplingParams(logit_bias={17: 100.0}), position))
        assert drawn == [17]
        assert draw(logits, spec(SamplingParams(logit_bias={best: -100.0}), position)) != [best]


def test_a_banned_end_is_not_drawn_even_when_it_is_biased() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 50.0
    sampling = SamplingParams(temperature=0.0, logit_bias={2: 100.0}, stop_token_ids=frozenset({0}))
    one = SampleSpec(sampling, 0, 0, (), (), is_eos_banned=True)
    assert draw(logits, one, eos_ids=frozenset({2})) == [1]
    assert draw(logits, replace(one, is_eos_banned=False), eos_ids=frozenset({2})) == [2]


def test_a_ban_of_all_ids_is_no_ban() -> None:
    logits = torch.arange(4.0)[None]
    one = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), is_eos_banned=True)
    assert draw(logits, one, eos_ids=frozenset(range(4))) == [3]


def test_penalties_count_what_they_should() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, -1.0]])
    greedy = SamplingParams(temperature=0.0)
    # Repetition sees the prompt; presence and frequency see the answer only.
    assert draw(logits, spec(replace(greedy, repetition_penalty=1.5), prompt=(0,), output=(1,))) == [2]
    assert draw(logits, spec(replace(greedy, presence_penalty=1.0), prompt=(0,), output=(1,))) == [0]
    assert draw(logits, spec(replace(greedy, frequency_penalty=0.5), output=(0, 0, 1, 2, 2))) == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 2.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_values_draw_an_id(temperature: float, scale: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * scale
    for filters in ({}, {"top_k": 5, "top_p": 0.3, "min_p": 0.2}):
        one = spec(SamplingParams(temperature=temperature, **filters))  # type: ignore[arg-type]
        assert draw(logits, one) == [draw_by_reference(logits[0], one)]


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.full((300, VOCAB), -torch.inf)
    logits[:, [5, 40]] = 0.0
    assert set(draw(logits, *(spec(SamplingParams(), position) for position in range(300)))) == {5, 40}


def test_columns_beyond_the_vocabulary_are_no_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 45:] = 10.0
    logits[0, 7] = 5.0
    assert Sampler(45).sample(logits, [spec(SamplingParams(temperature=0.0))], ())[0][0] == 7


def test_a_row_without_a_finite_maximum_is_refused() -> None:
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="finite"):
            draw(torch.tensor([[0.0, bad]]), spec(SamplingParams()))


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    logits[0, 10] = logits[0, 20] = 20.0
    expected = reference.raw_logprobs(logits[0].double())
    sampling = SamplingParams(temperature=0.3, top_k=2, logit_bias={1: 100.0}, num_logprobs=4)
    (token_id, logprob), (_, without_top) = Sampler(VOCAB).sample(
        logits.expand(2, -1), [spec(sampling), spec(replace(sampling, num_logprobs=0))], ()
    )
    assert token_id == 1
    assert logprob is not None
    assert without_top is not None
    assert logprob.token_id == 1
    assert logprob.logprob == pytest.approx(expected[1].item(), abs=1e-12)
    assert [other for other, _ in logprob.top][:2] == [10, 20]  # Best first, the lower id of equals before.
    order = torch.argsort(expected, descending=True, stable=True)[:4]
    assert [other for other, _ in logprob.top] == order.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(expected[order].tolist(), abs=1e-12)
    assert without_top.top == ()


def test_no_logprob_unless_asked_for() -> None:
    assert Sampler(VOCAB).sample(torch.zeros(1, VOCAB), [spec(SamplingParams())], ())[0][1] is None
