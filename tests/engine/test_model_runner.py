"""The runner: inputs, copies, which rows are sampled, and numbers that are not finite."""

from __future__ import annotations

import pytest
import torch
from tiny import BASE, KINDS, decoder_of_kind, logits_of, random_ids, random_tensors, runner_of, sequence

from chatkv.engine.batch import Batch
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.config import ModelConfig
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.step_rows import NOT_FINITE

LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}
POISONED_ID = 7


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> Decoder:
    return decoder_of_kind(kind, LLAMA)


@pytest.fixture(scope="module")
def poisoned_model(kind: str) -> Decoder:
    """The embedding of one id is not finite."""
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["model.embed_tokens.weight"][POISONED_ID] = float("nan")
    return decoder_of_kind(kind, LLAMA, tensors)


@pytest.fixture
def runner(model: Decoder) -> ModelRunner:
    return runner_of(model, num_blocks=40)


def test_each_sample_is_drawn_from_its_sequences_last_row(runner: ModelRunner) -> None:
    first, second, third = (random_ids(count, 211, seed=count) for count in (20, 5, 9))
    expected = [logits_of(runner, sequence(ids, 0, [8, 9]))[0][-1].argmax().item() for ids in (first, third)]
    result = runner.execute(
        Batch([sequence(first, 0, [0, 1], samples=3), sequence(second, 0, [2]), sequence(third, 0, [3], samples=1)])
    )
    assert [r.token_ids for r in result.sequences] == [(expected[0],) * 3, (), (expected[1],)]
    assert [len(r.logprobs) for r in result.sequences] == [3, 0, 1]
    assert all(r.error is None for r in result.sequences)


def test_an_empty_batch_still_copies(runner: ModelRunner) -> None:
    logits_of(runner, sequence(random_ids(16, 211), 0, [3]))
    assert runner.execute(Batch((), [(3, 9)])).sequences == ()
    assert torch.equal(runner.pool[9], runner.pool[3])


def test_a_copied_tail_goes_on_as_the_original(runner: ModelRunner) -> None:
    ids = random_ids(30, 211)
    (whole,) = logits_of(runner, sequence(ids, 0, [5, 6]))
    logits_of(runner, sequence(ids[:24], 0, [0, 1]))
    copies = Batch([sequence(ids[24:], 24, [0, 2]), sequence(ids[24:26], 24, [0, 1])], [(1, 2)])
    rows = runner.all_logits(copies)
    assert torch.equal(rows[:6], whole[24:])
    assert torch.equal(rows[6:], whole[24:26])


def test_a_sequence_that_is_not_finite_fails_alone(poisoned_model: Decoder) -> None:
    runner = runner_of(poisoned_model, num_blocks=12)
    good, bad = [20, 30, 40], [20, POISONED_ID, 40]
    alone = runner.execute(Batch([sequence(good, 0, [0], samples=1)])).sequences[0]
    batch = [sequence(bad, 0, [1], samples=2), sequence(good, 0, [2], samples=1), sequence(bad, 0, [3])]
    first, second, third = runner.execute(Batch(batch)).sequences
    assert first.error == third.error == NOT_FINITE
    assert first.token_ids == ()
    assert second == alone


def test_blocks_of_a_failed_sequence_do_no_harm_to_the_next(poisoned_model: Decoder) -> None:
    runner = runner_of(poisoned_model, num_blocks=12)
    runner.execute(Batch([sequence([POISONED_ID] * 32, 0, [4, 5])]))
    good = [20, 30, 40]
    (clean,) = logits_of(runner, sequence(good, 0, [0]))
    (reused,) = logits_of(runner, sequence(good, 0, [5]))
    assert clean.isfinite().all()
    assert torch.equal(clean, reused)


def test_logits_that_overflow_are_an_error(kind: str) -> None:
    tensors = random_tensors(ModelConfig.from_hf(LLAMA))
    tensors["lm_head.weight"][3] = 3e38
    runner = runner_of(decoder_of_kind(kind, LLAMA, tensors), num_blocks=4)
    (result,) = runner.execute(Batch([sequence([1, 2, 3], 0, [0], samples=1)])).sequences
    assert result.error == NOT_FINITE


def test_more_samples_than_rows_of_logits_at_a_time(runner: ModelRunner) -> None:
    """Each of 36 sequences draws what it draws alone."""
    ids = random_ids(36, 211, seed=4)
    alone = [runner.execute(Batch([sequence([token], 0, [36], samples=1)])).sequences[0] for token in ids]
    batch = [sequence([token], 0, [block], samples=1) for block, token in enumerate(ids)]
    assert list(runner.execute(Batch(batch)).sequences) == alone


def test_a_token_id_that_the_model_does_not_know_is_refused(runner: ModelRunner) -> None:
    for token in (211, -1):
        with pytest.raises(IndexError):
            runner.execute(Batch([sequence([3, token], 0, [0], samples=1)]))
