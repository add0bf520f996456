"""What the quick way draws is what the plain way draws, at every border; and it is taken nearly always."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chatkv.engine.batch import SampleSpec
from chatkv.engine.draw import draw, kept_ids, weights_of
from chatkv.engine.quick_draw import quick_draw
from chatkv.engine.request import SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.engine.token_history import NUM_HISTORIES_KEPT, TokenHistories

VOCAB = 20_000
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.8, top_k=40),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.05),
    SamplingParams(temperature=1.2, top_k=7, top_p=0.8),
    SamplingParams(min_p=0.05),
]


def peaked_row(seed: int) -> NDArray[np.float32]:
    """As models make them: few ids are likely, and the others have a tail together."""
    generator = np.random.default_rng(seed)
    row = generator.normal(0, 2.4, VOCAB)
    likely = generator.random(VOCAB) > 0.999
    row[likely] += generator.normal(12, 4, int(likely.sum()))
    return row.astype(np.float32)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_adjusted", [False, True])
def test_the_quick_way_is_taken_and_draws_the_same(sampling: SamplingParams, is_adjusted: bool) -> None:
    random = Random(7)
    num_quick = 0
    for seed in range(20):
        row = peaked_row(seed)
        logits = row.astype(np.float64) / 1.1 if is_adjusted else row
        for _ in range(20):
            uniform = random.random()
            quick = quick_draw(logits, sampling, uniform)
            num_quick += quick is not None
            assert quick is None or quick == draw(logits, sampling, uniform)
    assert num_quick >= 0.9 * 400


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_at_the_borders_of_the_pick_too(sampling: SamplingParams) -> None:
    """A uniform number that is a border, and its neighbours from far to the next float."""
    for seed in range(3):
        row = peaked_row(seed)
        weights = weights_of(row, sampling.temperature)
        ids = kept_ids(weights, sampling)
        cumulative = np.cumsum(weights if ids is None else weights[ids])
        borders = cumulative / cumulative[-1]
        likely = np.argsort(weights if ids is None else weights[ids])[-8:]
        for border in borders[likely]:
            for distance in (0.0, 1e-16, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4):
                for uniform in (border - distance, border + distance):
                    if 0 <= uniform < 1:
                        quick = quick_draw(row, sampling, float(uniform))
                        assert quick is None or quick == draw(row, sampling, float(uniform))


@pytest.mark.parametrize("top_k", [0, 40])
def test_at_the_borders_of_top_p_too(top_k: int) -> None:
    """Shares that a number of the likeliest ids makes exactly, or nearly."""
    row = peaked_row(3)
    weights = np.sort(weights_of(row, 1.0))[::-1]
    shares = np.cumsum(weights[:top_k] if top_k else weights)
    shares = shares / shares[-1]
    for share in shares[:30]:
        for distance in (0.0, 1e-16, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4):
            for top_p in (share - distance, share + distance):
                sampling = SamplingParams(top_p=min(float(top_p), 1.0), top_k=top_k)
                for uniform in (0.0, 0.3, 0.999999):
                    quick = quick_draw(row, sampling, uniform)
                    assert quick is None or quick == draw(row, sampling, uniform)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_of_all_shapes(sampling: SamplingParams) -> None:
    generator = np.random.default_rng(5)
    rows = {
        "equal": np.zeros(VOCAB),
        "equal in pairs": np.repeat(generator.normal(0, 3, VOCAB // 2), 2),
        "few values": np.round(generator.normal(0, 2, VOCAB)),
        "tiny": generator.normal(0, 1e-30, VOCAB),
        "huge": generator.normal(0, 1e30, VOCAB),
        "shifted": generator.normal(90, 3, VOCAB),
        "impossible but for three": np.where(np.arange(VOCAB) % 7001 == 5, 1.0, -np.inf),
        "the lowest float but for one": np.where(np.arange(VOCAB) == 77, 3.0, np.finfo(np.float32).min),
    }
    for row in rows.values():
        for logits in (row.astype(np.float32), row.astype(np.float32) * np.float64(1.1)):
            for uniform in (0.0, 1e-9, 0.25, 0.5, 0.75, 1 - 2**-53):
                quick = quick_draw(logits, sampling, uniform)
                assert quick is None or quick == draw(logits, sampling, uniform)


def test_penalties_of_a_growing_answer_are_those_of_an_answer_seen_at_once() -> None:
    """The sampler counts ids from step to step."""
    generator = torch.Generator().manual_seed(3)
    sampling = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, temperature=0.0)
    sampler = Sampler(50)
    prompts = [(1, 2, 2, 60, -1), (3,)]
    answers: list[list[int]] = [[], []]
    for position in range(120):
        logits = torch.randn(2, 50, generator=generator) * 3
        specs = [
            SampleSpec(sampling, 0, position, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        drawn = sampler.sample(logits, specs, ())
        fresh = [
            Sampler(50).sample(logits[row : row + 1], [SampleSpec(sampling, 0, position, prompt, tuple(answer))], ())[0]
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        assert drawn == fresh
        for answer, (token_id, _) in zip(answers, drawn, strict=True):
            answer.append(token_id)


def test_only_the_latest_histories_are_kept() -> None:
    histories = TokenHistories(1000)
    specs = [SampleSpec(SamplingParams(), 0, 0, (number,), [number]) for number in range(2 * NUM_HISTORIES_KEPT)]
    for spec in specs:
        assert histories.of(spec).seen().ids.tolist() == [spec.prompt_token_ids[0]]
        assert len(histories) <= NUM_HISTORIES_KEPT
    assert histories.of(specs[-1]) is histories.of(specs[-1])
