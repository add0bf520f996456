"""What a client sees of a request: ids, text, reasons, progress; and what is left behind when it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from harness import GREEDY_10, Harness, prompt
from integer_runner import EOS_ID

from chatkv.engine.batch import Batch, BatchResult, SequenceResult
from chatkv.engine.errors import InvalidRequestError
from chatkv.engine.request import FinishReason, Priority, RequestStatus, SamplingParams, TokenLogprob

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def assert_nothing_held(h: Harness) -> None:
    stats = h.engine.stats()
    assert (stats.num_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not h.engine.has_unfinished
    h.engine.scheduler.check_integrity()


# --- several choices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt_tokens", [1, 16, 37, 48])
def test_n_choices_are_what_each_is_alone_and_the_prompt_is_computed_once(num_prompt_tokens: int) -> None:
    h = Harness()
    sampling = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    h.add("a", prompt(num_prompt_tokens), sampling, n=4)
    h.run()
    answers = [h.answers["a", choice].token_ids for choice in range(4)]
    assert answers == [h.expected(prompt(num_prompt_tokens), sampling, choice) for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert h.engine.stats().num_computed_prompt_tokens == num_prompt_tokens
    assert_nothing_held(h)


def test_a_fork_shares_full_blocks_and_copies_its_tail_at_once() -> None:
    h = Harness()
    h.add("a", prompt(60), LONG, n=4)
    while ("a", 3) not in h.answers:
        h.step()
    assert h.engine.stats().num_used == 3 + 4
    h.step()
    assert len(h.last_batch.block_copies) == 3
    assert len({destination for _, destination in h.last_batch.block_copies}) == 3
    h.step()
    assert h.last_batch.block_copies == []
    h.take(h.engine.cancel("a"))
    assert_nothing_held(h)


def test_forks_without_room_wait_and_answer_the_same() -> None:
    h = Harness(num_blocks=8, max_context_tokens=100, max_num_seqs=3)
    sampling = SamplingParams(seed=1, max_tokens=50, ignore_eos=True)
    h.add("a", prompt(40), sampling, n=3)
    h.add("b", prompt(40, first=2), sampling, n=3)
    h.run()
    for name, first in (("a", 1), ("b", 2)):
        for choice in range(3):
            assert h.answers[name, choice].token_ids == h.expected(prompt(40, first=first), sampling, choice)
    assert h.engine.stats().num_preemptions > 0


# --- the end of an answer ----------------------------------------------------------------------------------------


def test_an_answer_ends_at_eos_at_a_stop_id_at_its_budget_and_at_the_context() -> None:
    h = Harness(max_context_tokens=120)
    free_running = h.expected(prompt(20), SamplingParams(temperature=0.0, ignore_eos=True))
    stop_id = free_running[12]
    first_stop = free_running.index(stop_id)
    stopped = h.ask(
        "a", prompt(20), SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({stop_id}))
    )
    assert stopped.reason is FinishReason.STOP
    assert stopped.token_ids == free_running[: first_stop + 1]
    assert h.ask("b", prompt(20), GREEDY_10).reason is FinishReason.LENGTH
    to_the_end = h.ask("c", prompt(20), SamplingParams(temperature=0.0, ignore_eos=True))
    assert to_the_end.reason is FinishReason.LENGTH
    assert len(to_the_end.token_ids) == 100
    by_seed = [h.ask(f"s{seed}", prompt(20), SamplingParams(seed=seed)) for seed in range(6)]
    ended = [answer for answer in by_seed if answer.reason is FinishReason.STOP]
    assert ended
    assert all(answer.token_ids[-1] == EOS_ID for answer in ended)


def test_eos_is_banned_until_min_tokens() -> None:
    h = Harness()
    h.add("a", prompt(20), SamplingParams(min_tokens=3, max_tokens=5))
    h.run()
    banned = [spec.is_eos_banned for batch in h.runner.batches for s in batch.sequences for spec in s.samples]
    assert banned[:5] == [True, True, True, False, False][: len(banned)]


# --- text --------------------------------------------------------------------------------------------------------


@dataclass
class Delta:
    text: str
    is_stopped: bool = False


class Words:
    """Each id is a word; the last word is held back until the next one shows that no stop string begins with it."""

    def __init__(self, tail: Sequence[int], stop: tuple[str, ...], resume_text: str) -> None:
        self.stop = stop
        self.held = resume_text

    def push(self, token_ids: Sequence[int]) -> Delta:
        (token_id,) = token_ids
        if str(token_id) in self.stop:
            return Delta(self.held, is_stopped=True)
        text, self.held = self.held, f"{token_id} "
        return Delta(text)

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text


def test_text_is_pushed_token_by_token_and_what_is_held_back_comes_at_the_end() -> None:
    h = Harness(new_text_stream=Words)
    answer = h.ask("a", prompt(20))
    assert answer.text == "".join(f"{token} " for token in answer.token_ids)


def test_eos_gives_no_text() -> None:
    h = Harness(new_text_stream=Words)
    seed = next(s for s in range(50) if h.expected(prompt(20), SamplingParams(seed=s, max_tokens=40))[-1] == EOS_ID)
    answer = h.ask("a", prompt(20), SamplingParams(seed=seed, max_tokens=40))
    assert answer.reason is FinishReason.STOP
    assert answer.text == "".join(f"{token} " for token in answer.token_ids[:-1])


def test_e6_a_stop_string_ends_the_answer_and_nothing_of_it_is_shown() -> None:
    h = Harness(new_text_stream=Words)
    ids = h.expected(prompt(20), LONG)
    cut = next(index for index in range(3, 100) if ids[index] not in ids[:index])
    sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=(str(ids[cut]),))
    h.add("a", prompt(20), sampling)
    h.run()
    answer = h.answers["a", 0]
    assert answer.reason is FinishReason.STOP
    assert answer.token_ids == ids[: cut + 1]
    assert answer.text == "".join(f"{token} " for token in ids[:cut])
    assert_nothing_held(h)


def test_a_cancelled_answer_keeps_the_text_held_back() -> None:
    h = Harness(new_text_stream=Words)
    h.add("a", prompt(20), LONG)
    for _ in range(5):
        h.step()
    h.take(h.engine.cancel("a"))
    answer = h.answers["a", 0]
    assert answer.text == "".join(f"{token} " for token in answer.token_ids)


# --- cancel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("state", ["queued", "prefill", "prompt just read", "decode", "preempted"])
def test_e2_cancel_frees_everything_at_once_in_every_state(state: str, n: int) -> None:
    h = Harness(num_blocks=20, max_context_tokens=320, max_num_seqs=4)
    h.add("other", prompt(20, first=9), LONG)
    if state == "queued":
        h.add("a", prompt(299), LONG, n=n)
        h.step()
        h.add("b", prompt(299), LONG, n=n)
        target = "b"
    else:
        h.add("a", prompt(100), LONG, n=n)
        target = "a"
    sequences = h.engine._active.by_id[target].sequences
    if state == "prefill":
        h.step()
        h.step()
        assert 0 < sequences[0].num_computed_tokens < 100
    elif state == "prompt just read":
        while not sequences[0].output_token_ids:
            h.step()
    elif state == "decode":
        while len(sequences[0].output_token_ids) < 5:
            h.step()
    elif state == "preempted":
        while not any(sequence.status is RequestStatus.PREEMPTED for sequence in sequences):
            h.step()
    outputs = h.take(h.engine.cancel(target))
    assert sorted(output.index for output in outputs) == list(range(n))
    assert all(output.finish_reason is FinishReason.CANCELLED for output in outputs)
    assert h.engine.cancel(target) == []
    h.engine.scheduler.check_integrity()
    held = {block_id for sequence in h.engine.scheduler.running for block_id in sequence.block_table}
    assert h.engine.stats().num_used == len(held)
    for request_id in ("a", "other"):
        h.take(h.engine.cancel(request_id))
    assert_nothing_held(h)


# --- errors ------------------------------------------------------------------------------------------------------


class Failing:
    """Fails once, for one request or for the whole batch."""

    def __init__(self, h: Harness, bad_id: str | None) -> None:
        self.h = h
        self.bad_id = bad_id
        self.is_armed = False

    def execute(self, batch: Batch) -> BatchResult:
        result = self.h.execute(batch)
        if not self.is_armed:
            return result
        self.is_armed = False
        if self.bad_id is None:
            raise RuntimeError("out of luck")
        return BatchResult(
            [
                SequenceResult(error="the logits are not finite") if sequence.request_id == self.bad_id else own
                for sequence, own in zip(batch.sequences, result.sequences, strict=True)
            ]
        )


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_sequence_ends_its_request_only_and_its_blocks_are_not_published(n: int) -> None:
    h = Harness()
    failing = Failing(h, "bad")
    h.engine._steps._runner = failing
    h.add("good", prompt(20, first=2), LONG)
    h.add("bad", prompt(60), LONG, n=n)
    failing.is_armed = True
    h.step()
    assert h.engine.count_cached(prompt(60)) == 0
    assert {h.answers["bad", choice].reason for choice in range(n)} == {FinishReason.ERROR}
    assert h.answers["bad", 0].outputs[-1].error == "the logits are not finite"
    for _ in range(5):
        h.step()
    assert h.answers["good", 0].token_ids == h.expected(prompt(20, first=2), LONG)[:5]
    assert h.engine.stats().num_failed_requests == 1
    assert h.ask("again", prompt(60)).num_cached_tokens == 0


def test_one_failed_choice_ends_all_choices_of_its_request() -> None:
    h = Harness()
    failing = Failing(h, "bad")
    h.engine._steps._runner = failing
    h.add("bad", prompt(20), LONG, n=3)
    h.step()
    h.step()
    failing.is_armed = True
    h.step()
    assert {h.answers["bad", choice].reason for choice in range(3)} == {FinishReason.ERROR}
    assert_nothing_held(h)


def test_an_exception_of_the_runner_fails_its_batch_and_the_engine_goes_on() -> None:
    h = Harness(max_num_seqs=2)
    failing = Failing(h, None)
    h.engine._steps._runner = failing
    for index, name in enumerate(("a", "b", "queued")):
        h.add(name, prompt(20, first=index + 1))
    h.step()
    failing.is_armed = True
    h.step()
    for name in ("a", "b"):
        assert h.answers[name, 0].reason is FinishReason.ERROR
        assert h.answers[name, 0].outputs[-1].error == "The model runner failed: RuntimeError: out of luck"
    h.run()
    assert h.answers["queued", 0].token_ids == h.expected(prompt(20, first=3))
    assert_nothing_held(h)


def test_a_runner_that_answers_something_else_than_it_was_asked_is_an_error() -> None:
    h = Harness()

    class Short:
        def execute(self, batch: Batch) -> BatchResult:
            return BatchResult([])

    h.engine._steps._runner = Short()
    h.add("a", prompt(20))
    h.step()
    error = h.answers["a", 0].outputs[-1].error
    assert error is not None
    assert "1 sequences were run, 0 came back" in error


@pytest.mark.parametrize(
    ("token_ids", "n", "param"),
    [((), 1, "messages"), ((-1,), 1, "prompt"), ((2**32,), 1, "prompt"), ((1,), 0, "n"), ((1,), 9, "n")],
)
def test_requests_that_can_never_run_are_refused(token_ids: tuple[int, ...], n: int, param: str) -> None:
    h = Harness()
    with pytest.raises(InvalidRequestError) as caught:
        h.add("a", token_ids, n=n)
    assert caught.value.param == param
    assert_nothing_held(h)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    h = Harness()
    h.add("a", prompt(20))
    with pytest.raises(InvalidRequestError, match="in use"):
        h.add("a", prompt(20))
    h.run()
    h.answers.clear()
    h.ask("a", prompt(20))


# --- progress and figures ----------------------------------------------------------------------------------------


def test_progress_tells_the_place_in_the_queue_and_how_far_the_prompt_is_read() -> None:
    h = Harness(max_num_seqs=1, tokens_per_s=300)
    h.add("a", prompt(200))
    h.add("b", prompt(10, first=2))
    h.add("c", prompt(10, first=3), priority=Priority.EDITOR)
    h.run()

    def progress(name: str) -> list[tuple[RequestStatus, int | None, int]]:
        seen = [output.progress for output in h.answers[name, 0].outputs if output.progress is not None]
        return [(p.status, p.queue_position, p.num_computed_tokens) for p in seen]

    reading = progress("a")
    computed = [num for _, _, num in reading]
    assert all(entry[:2] == (RequestStatus.RUNNING, None) for entry in reading)
    assert computed == sorted(set(computed))
    assert len(computed) >= 2
    assert 0 < computed[0] < computed[-1] < 200
    assert progress("b") == [(RequestStatus.WAITING, 1, 0)]
    assert progress("c") == [(RequestStatus.WAITING, 2, 0), (RequestStatus.WAITING, 1, 0)]
    for answer in h.answers.values():
        is_token = [bool(output.token_ids) for output in answer.outputs]
        assert is_token == sorted(is_token), "no progress once tokens come"


def test_reading_progress_does_not_flood() -> None:
    h = Harness(
        num_blocks=300, max_context_tokens=4500, target_step_s=0.001, tokens_per_s=1e6, max_num_batched_tokens=16
    )
    h.execute = h.runner.execute  # type: ignore[method-assign]
    h.engine._steps._runner = h.runner
    h.add("a", prompt(4000))
    h.run()
    reports = [output for output in h.answers["a", 0].outputs if output.progress is not None]
    assert len(h.runner.batches) > 250
    assert len(reports) == 1, "no time passes on this clock"


def test_logprobs_are_passed_on() -> None:
    h = Harness()
    execute = h.execute

    class WithLogprobs:
        def execute(self, batch: Batch) -> BatchResult:
            results = execute(batch).sequences
            return BatchResult(
                [SequenceResult(r.token_ids, [TokenLogprob(token, -0.5) for token in r.token_ids]) for r in results]
            )

    h.engine._steps._runner = WithLogprobs()
    answer = h.ask("a", prompt(20))
    logprobs = [entry for output in answer.outputs for entry in output.logprobs]
    assert [entry.token_id for entry in logprobs] == answer.token_ids


def test_the_figures_add_up() -> None:
    h = Harness(num_blocks=40)
    h.ask("a", prompt(64))
    for index in range(3):
        h.add(f"{index}", prompt(64) + prompt(20 + index, first=index + 2), LONG)
    for _ in range(4):
        h.step()
    stats = h.engine.stats()
    assert stats.num_used + stats.num_cached + stats.num_free == stats.num_blocks
    assert stats.num_running == stats.batch_size == 3
    assert stats.num_prefix_query_tokens == 64 + sum(64 + 20 + index for index in range(3))
    assert stats.num_prefix_hit_tokens == 3 * 64
    assert stats.num_computed_prompt_tokens == 64 + 20 + 21 + 22
    running = h.engine.scheduler.running
    num_slots = 16 * (4 + sum(len(s.block_table) - 4 for s in running))
    num_tokens = 64 + sum(s.num_computed_tokens - 64 for s in running)
    assert stats.unused_slot_share == pytest.approx((num_slots - num_tokens) / num_slots)
    assert 0 < stats.step_p50_s <= stats.step_p99_s
    h.run()
    assert h.engine.stats().batch_size == 0
