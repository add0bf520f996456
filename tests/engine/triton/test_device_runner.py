"""The runner of a device: launched steps, ids that never leave it, padded steps, and numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from compiled_forms import noted_forms
from device_models import INTERPRETER, VOCAB_SIZE, model_of, tensors
from tiny import random_ids, sequence

from chatkv.engine.batch import Batch, ScheduledSequence, pending_id
from chatkv.engine.device_runner import DeviceRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.step_rows import NOT_FINITE, step_rows
from chatkv.kernels.triton.step_inputs import StepInputs

POISONED_ID = 7


@pytest.fixture(scope="module")
def model() -> Decoder:
    return model_of("int8", INTERPRETER)


def runner_of(model: Decoder, num_blocks: int = 12) -> DeviceRunner:
    runner = DeviceRunner(model, num_blocks, VOCAB_SIZE, num_blocks * 16)
    runner.pool.fill_(0xFF)
    return runner


@pytest.fixture(scope="module")
def shared_runner(model: Decoder) -> DeviceRunner:
    return runner_of(model)


@pytest.fixture
def runner(shared_runner: DeviceRunner) -> DeviceRunner:
    shared_runner.pool.fill_(0xFF)
    return shared_runner


def ids_of(runner: DeviceRunner, *sequences: ScheduledSequence) -> list[Sequence[int]]:
    return [result.token_ids for result in runner.execute(Batch(sequences)).sequences]


def best_ids(runner: DeviceRunner, sequence_: ScheduledSequence) -> list[int]:
    """After each row."""
    return [int(token) for token in runner.all_logits(Batch([sequence_])).argmax(-1)]


def test_each_sample_is_drawn_from_its_sequences_last_row(runner: DeviceRunner) -> None:
    first, second, third = (random_ids(count, VOCAB_SIZE, seed=count) for count in (20, 5, 9))
    expected = [best_ids(runner, sequence(ids, 0, [8, 9]))[-1] for ids in (first, third)]
    batch = [sequence(first, 0, [0, 1], samples=3), sequence(second, 0, [2]), sequence(third, 0, [3], samples=1)]
    result = runner.execute(Batch(batch))
    assert [r.token_ids for r in result.sequences] == [(expected[0],) * 3, (), (expected[1],)]
    assert [len(r.logprobs) for r in result.sequences] == [3, 0, 1]
    assert all(r.error is None for r in result.sequences)


def test_an_empty_batch_still_copies(runner: DeviceRunner) -> None:
    runner.all_logits(Batch([sequence(random_ids(16, VOCAB_SIZE), 0, [3])]))
    assert runner.execute(Batch((), [(3, 9)])).sequences == ()
    assert torch.equal(runner.pool[9], runner.pool[3])


def test_pending_ids_are_those_that_the_step_before_has_drawn(runner: DeviceRunner) -> None:
    """By their place among all samples of that step, which the host collects later."""
    first, second = random_ids(9, VOCAB_SIZE, seed=1), random_ids(4, VOCAB_SIZE, seed=2)
    tables = ([0], [1])
    ids = ids_of(runner, sequence(first, 0, tables[0], samples=2), sequence(second, 0, tables[1], samples=1))
    known = ids_of(
        runner, sequence([ids[1][0]], 4, tables[1], samples=1), sequence([ids[0][1]], 9, tables[0], samples=1)
    )
    runner.pool.fill_(0xFF)
    prompts = [sequence(first, 0, tables[0], samples=2), sequence(second, 0, tables[1], samples=1)]
    decodes = [sequence([pending_id(2)], 4, tables[1], samples=1), sequence([pending_id(1)], 9, tables[0], samples=1)]
    launched = [runner.launch(Batch(prompts)), runner.launch(Batch(decodes))]
    assert all(step.is_ready() for step in launched)
    assert [r.token_ids for r in launched[0].wait().sequences] == ids
    assert [r.token_ids for r in launched[1].wait().sequences] == known


def test_a_pending_id_is_told_from_one_that_nobody_samples(runner: DeviceRunner) -> None:
    runner.execute(Batch([sequence([3], 0, [0], samples=1)]))
    for token in (pending_id(1), VOCAB_SIZE):
        with pytest.raises(IndexError, match="token id"):
            runner.execute(Batch([sequence([3, token], 0, [0], samples=1)]))
    with pytest.raises(IndexError):
        runner.execute(Batch([sequence([pending_id(0)], 0, [0], samples=1)]))  # the launch before has failed


@pytest.mark.parametrize("num_sequences", [1, 3, 16])
def test_padded_decodes_draw_what_they_draw_unpadded(model: Decoder, num_sequences: int) -> None:
    prompts = [random_ids(3 + index % 5, VOCAB_SIZE, seed=index) for index in range(num_sequences)]
    runners = [runner_of(model, num_sequences + 1), runner_of(model, num_sequences + 1)]
    runners[1]._graphs.suits = lambda rows: False  # type: ignore[method-assign]
    results = []
    for runner in runners:
        prefills = [sequence(ids, 0, [block]) for block, ids in enumerate(prompts)]
        runner.execute(Batch(prefills))
        spare = runner.pool[num_sequences].clone()
        decodes = [sequence([block], len(ids), [block], samples=1) for block, ids in enumerate(prompts)]
        results.append((ids_of(runner, *decodes), runner.pool[:num_sequences].clone()))
        assert torch.equal(runner.pool[num_sequences], spare), "padding has written"
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_a_decode_that_is_not_sampled_goes_among_those_that_are(runner: DeviceRunner) -> None:
    alone = ids_of(runner, sequence([5], 0, [0], samples=1)), ids_of(runner, sequence([9], 0, [1], samples=1))
    batch = [sequence([4], 0, [2]), sequence([5], 0, [0], samples=1), sequence([9], 0, [1], samples=2)]
    assert ids_of(runner, *batch) == [(), alone[0][0], alone[1][0] * 2]


def test_a_block_begins_empty(runner: DeviceRunner) -> None:
    runner.execute(Batch([sequence(random_ids(18, VOCAB_SIZE), 0, [0, 1], samples=1)]))
    layout = runner.model.layout
    keys = layout.views(runner.pool).keys[1]
    assert keys[:, :, :2].abs().sum() > 0
    assert keys[:, :, 2:].abs().sum() == 0


def test_warming_up_writes_into_no_block(runner: DeviceRunner) -> None:
    progress: list[float] = []
    runner.warm_up(16, progress.append)
    assert (runner.pool == 0xFF).all()
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


def test_the_memory_of_the_largest_step_stays(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture gives back what torch has and does not use."""
    calls: list[object] = []
    forward = runner._executor.forward

    def noted(inputs: StepInputs, *others: Any) -> Any:
        calls.append(len(inputs.token_ids))
        return forward(inputs, *others)

    monkeypatch.setattr(runner._executor, "forward", noted)
    monkeypatch.setattr(runner._graphs, "capture", lambda on_progress: calls.append("capture"))
    runner.warm_up(16)
    assert calls == ["capture", 2, 16]


def test_no_sum_of_the_library_is_in_16_bits(runner: DeviceRunner) -> None:
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("weight_format", ["fp16", "int8", "int4", "int4-affine"])
def test_after_warming_up_no_step_compiles(weight_format: str, is_deterministic: bool) -> None:
    model = model_of(weight_format, replace(INTERPRETER, is_deterministic=is_deterministic))
    runner = runner_of(model, 40)
    with noted_forms() as warm:
        runner.warm_up(128)
        for graph in runner._graphs.graphs:
            runner._graphs.run(graph)
    random = Random(3)
    for _ in range(60):
        lengths = [random.choice((1, 1, 1, 2, 7, 16, 33, 60)) for _ in range(random.randint(1, 3))]
        if random.random() < 0.4:
            lengths = [1] * random.choice((1, 2, 3, 5, 16, 17, 31))
        with noted_forms() as forms:
            runner.launch(Batch([_run_of(random, length) for length in lengths])).wait()
        assert not [form[0] for form in forms - warm], f"rows {lengths}"


def _run_of(random: Random, length: int) -> ScheduledSequence:
    start = random.choice((0, 15, 16, 200, 500))
    table = [random.randrange(40) for _ in range(-(-(start + length) // 16))]
    return sequence([1] * length, start, table, samples=random.choice((0, 1, 1, 2)))


def poisoned() -> Decoder:
    """The embedding of one id is not finite."""
    table = tensors()["model.embed_tokens.weight"]
    kept = table[POISONED_ID].clone()
    table[POISONED_ID] = float("nan")
    try:
        return model_of("fp16", INTERPRETER)
    finally:
        table[POISONED_ID] = kept


def test_a_sequence_that_is_not_finite_fails_alone() -> None:
    runner = runner_of(poisoned())
    good, bad = [20, 30, 40], [20, POISONED_ID, 40]
    alone = runner.execute(Batch([sequence(good, 0, [0], samples=1)])).sequences[0]
    batch = [sequence(bad, 0, [1], samples=2), sequence(good, 0, [2], samples=1), sequence(bad, 0, [3])]
    first, second, third = runner.execute(Batch(batch)).sequences
    assert first.error == third.error == NOT_FINITE
    assert first.token_ids == ()
    assert second == alone
    (reused,) = runner.execute(Batch([sequence(good, 0, [1], samples=1)])).sequences
    assert reused == alone


def test_rows_of_the_deterministic_setting_do_not_depend_on_their_company() -> None:
    model = model_of("int4", replace(INTERPRETER, is_deterministic=True))
    runner = runner_of(model)
    ids, others = random_ids(19, VOCAB_SIZE, seed=3), random_ids(7, VOCAB_SIZE, seed=4)
    whole = runner.all_logits(Batch([sequence(ids, 0, [0, 1])]))
    runner.all_logits(Batch([sequence(ids[:11], 0, [2, 3])]))
    mixed = runner.all_logits(Batch([sequence(others, 0, [4]), sequence(ids[11:18], 11, [2, 3])]))
    last = runner.all_logits(Batch([sequence([others[0]], 7, [4]), sequence(ids[18:], 18, [2, 3])]))
    assert torch.equal(torch.cat((mixed[7:], last[1:])), whole[11:])
    decodes = Batch([sequence([token], 0, [5 + index]) for index, token in enumerate((*others[:2], *ids[:1]))])
    graph, _ = runner._graphs.pack(step_rows(decodes, range(3)), [5, 6, 7])
    padded = runner._graphs.run(graph).logits
    assert len(padded) == 4
    assert torch.equal(padded[2], whole[0])
