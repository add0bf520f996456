from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fake_tier import FakeTier
from harness import prompt
from integer_runner import EOS_ID, IntegerImages, IntegerRunner, naive_answer, new_hasher

from chatkv.engine.batch import Batch, BatchResult
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.engine_thread import EngineThread
from chatkv.engine.errors import EngineClosedError, InvalidRequestError, PromptTooLongError, QueueFullError
from chatkv.engine.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams, WarmMode

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
WAIT_S = 20.0


class GatedRunner(IntegerRunner):
    """Runs a step only when the gate is open, and tells when one stands before it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()

    def execute(self, batch: Batch) -> BatchResult:
        if not self.gate.is_set():
            self.is_inside.set()
            assert self.gate.wait(WAIT_S)
            self.is_inside.clear()
        return super().execute(batch)


class Inbox:
    """Collects outputs; `until` waits for a condition on them."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.condition = threading.Condition()

    def __call__(self, output: RequestOutput) -> None:
        with self.condition:
            self.outputs.append(output)
            self.condition.notify_all()

    def until(self, is_met: Callable[[list[RequestOutput]], bool]) -> list[RequestOutput]:
        with self.condition:
            assert self.condition.wait_for(lambda: is_met(self.outputs), WAIT_S), self.outputs
            return list(self.outputs)

    def until_finished(self, num_choices: int = 1) -> list[RequestOutput]:
        return self.until(lambda outputs: sum(o.finish_reason is not None for o in outputs) == num_choices)


@contextmanager
def running(
    runner: GatedRunner | None = None, tier: FakeTier | None = None, **settings: int
) -> Iterator[tuple[EngineThread, GatedRunner]]:
    runner = runner or GatedRunner(64)
    config = EngineConfig(
        **{"max_context_tokens": 512, "num_blocks": 64, "max_num_waiting": 4, "max_num_seqs": 4, **settings},  # type: ignore[arg-type]
        check_integrity=True,
    )
    engine = Engine(
        config,
        runner,
        new_hasher(),
        None,
        frozenset({EOS_ID}),
        poison=runner.poison,
        tiers=[tier] if tier else [],
        images=IntegerImages(runner),
    )
    thread = EngineThread(engine)
    try:
        yield thread, runner
    finally:
        runner.gate.set()
        thread.close()


def request(request_id: str, num_tokens: int = 20, sampling: SamplingParams = SHORT, n: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id, prompt(num_tokens), sampling, n=n)


def test_requests_from_many_threads_are_all_answered_right() -> None:
    with running(max_num_waiting=64) as (thread, _):
        inboxes = {f"{index}": Inbox() for index in range(12)}

        def submit(name: str) -> None:
            thread.submit(request(name, 20 + int(name)), inboxes[name])

        clients = [threading.Thread(target=submit, args=(name,)) for name in inboxes]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for name, inbox in inboxes.items():
            token_ids = [token for output in inbox.until_finished() for token in output.token_ids]
            assert token_ids == naive_answer(prompt(20 + int(name)), SHORT, 0, 512)[0]
        assert thread.is_idle


def test_an_idle_engine_uses_no_cpu_and_wakes_for_the_next_request() -> None:
    with running() as (thread, _):
        inbox = Inbox()
        thread.submit(request("a"), inbox)
        inbox.until_finished()
        clock = time.pthread_getcpuclockid(thread._thread.ident)
        settled = time.clock_gettime(clock)
        threading.Event().wait(0.3)  # no condition to wait for: what is measured is that nothing happens
        assert time.clock_gettime(clock) - settled < 0.01
        thread.submit(request("b"), inbox)
        inbox.until_finished(2)


def test_submit_refuses_at_once_what_can_never_run() -> None:
    with running() as (thread, runner):
        inbox = Inbox()
        with pytest.raises(PromptTooLongError):
            thread.submit(request("a", 512), inbox)
        with pytest.raises(InvalidRequestError):
            thread.submit(request("a", n=0), inbox)
        runner.gate.clear()
        thread.submit(request("a"), inbox)
        with pytest.raises(InvalidRequestError, match="in use"):
            thread.submit(request("a"), inbox)
        runner.gate.set()
        inbox.until_finished()
        assert {output.request_id for output in inbox.outputs} == {"a"}


def test_a_request_that_came_during_the_last_step_is_ended_too() -> None:
    with running() as (thread, runner):
        runner.gate.clear()
        first, second = Inbox(), Inbox()
        thread.submit(request("a", sampling=LONG), first)
        assert runner.is_inside.wait(WAIT_S)
        thread.submit(request("b", n=2), second)
        closer = threading.Thread(target=thread.close)
        closer.start()
        while not thread._is_closing:
            threading.Event().wait(0.001)
        runner.gate.set()
        closer.join(WAIT_S)
        for inbox, num_choices in ((first, 1), (second, 2)):
            outputs = inbox.until_finished(num_choices)
            assert {output.finish_reason for output in outputs} - {None} == {FinishReason.CANCELLED}


def test_the_queue_bound_counts_what_the_engine_has_not_read_yet() -> None:
    with running(max_num_waiting=3) as (thread, runner):
        runner.gate.clear()
        inbox = Inbox()
        thread.submit(request("a"), inbox)
        assert runner.is_inside.wait(WAIT_S)
        for name in ("b", "c", "d"):
            thread.submit(request(name), inbox)
        with pytest.raises(QueueFullError):
            thread.submit(request("e"), inbox)
        assert thread.stats().num_waiting >= 3
        runner.gate.set()
        inbox.until_finished(4)


@pytest.mark.parametrize("n", [1, 4])
def test_e2_a_cancel_during_a_step_is_done_before_the_next_one(n: int) -> None:
    with running() as (thread, runner):
        inbox = Inbox()
        thread.submit(request("a", 100, LONG, n), inbox)
        inbox.until(lambda outputs: any(output.token_ids for output in outputs))
        runner.gate.clear()
        assert runner.is_inside.wait(WAIT_S)
        num_tokens = runner.num_tokens_run
        thread.cancel("a")
        thread.cancel("a")
        thread.cancel("unknown")
        runner.gate.set()
        outputs = inbox.until_finished(n)
        last = [output for output in outputs if output.finish_reason is not None]
        assert {output.finish_reason for output in last} == {FinishReason.CANCELLED}
        assert sorted(output.index for output in last) == list(range(n))
        assert runner.num_tokens_run - num_tokens <= n, "the step that ran, and none after it"
        with running_idle(thread):
            assert thread.stats().num_used == 0


@contextmanager
def running_idle(thread: EngineThread) -> Iterator[None]:
    """A second request, answered, proves that the engine's figures are newer than what came before."""
    inbox = Inbox()
    thread.submit(request("later"), inbox)
    inbox.until_finished()
    thread.close(drain=True)
    yield


def test_a_request_cancelled_before_the_engine_reads_it_ends_too() -> None:
    with running() as (thread, runner):
        runner.gate.clear()
        busy, inbox = Inbox(), Inbox()
        thread.submit(request("busy"), busy)
        assert runner.is_inside.wait(WAIT_S)
        thread.submit(request("a"), inbox)
        thread.cancel("a")
        runner.gate.set()
        (output,) = inbox.until_finished()
        assert output.finish_reason is FinishReason.CANCELLED
        busy.until_finished()


def test_a_listener_that_fails_ends_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (thread, _):
        inbox = Inbox()

        def broken(output: RequestOutput) -> None:
            raise RuntimeError("the client is gone")

        thread.submit(request("a", sampling=LONG), broken)
        thread.submit(request("b"), inbox)
        inbox.until_finished()
        thread.close(drain=True)
        assert thread.is_idle
        assert thread.stats().num_generated_tokens < 400
        assert "a listener failed" in caplog.text


def test_a_bug_in_the_engine_fails_every_request_and_leaves_a_working_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as (thread, runner):
        runner.gate.clear()
        first, second = Inbox(), Inbox()
        thread.submit(request("a", n=2), first)
        assert runner.is_inside.wait(WAIT_S)
        thread.submit(request("b"), second)
        engine_kv = thread.engine.kv
        monkeypatch.setattr(engine_kv, "publish", lambda sequence: 1 / 0)
        runner.gate.set()
        failed = [output for output in first.until_finished(2) if output.finish_reason is not None]
        assert sorted(output.index for output in failed) == [0, 1]
        assert all("ZeroDivisionError" in str(output.error) for output in failed)
        second.until_finished()
        assert thread.engine.kv is not engine_kv, "the cache starts empty"
        third = Inbox()
        thread.submit(request("c"), third)
        assert third.until_finished()[-1].finish_reason is FinishReason.LENGTH
        assert "the engine failed" in caplog.text


def test_close_cancels_or_lets_requests_end() -> None:
    for drain, reason in ((False, FinishReason.CANCELLED), (True, FinishReason.LENGTH)):
        with running() as (thread, runner):
            runner.gate.clear()
            inbox = Inbox()
            thread.submit(request("a"), inbox)
            assert runner.is_inside.wait(WAIT_S)
            closer = threading.Thread(target=thread.close, kwargs={"drain": drain})
            closer.start()
            with thread._condition:
                assert thread._condition.wait_for(lambda: thread._is_closing, WAIT_S)
            with pytest.raises(EngineClosedError):
                thread.submit(request("b"), inbox)
            runner.gate.set()
            closer.join(WAIT_S)
            assert not closer.is_alive()
            assert [output.finish_reason for output in inbox.outputs if output.finish_reason] == [reason]
            assert thread.stats().num_used == 0
            thread.close()


def stored_chat(num_tokens: int = 96) -> FakeTier:
    """A tier that an earlier engine has left."""
    tier = FakeTier()
    with running(tier=tier) as (thread, _):
        inbox = Inbox()
        thread.submit(request("old", num_tokens, SHORT), inbox)
        inbox.until_finished()
    assert tier.is_closed
    return tier


def settle(thread: EngineThread) -> None:
    """What was reported before has been dealt with: the second call comes after the step that follows the first."""
    for _ in range(2):
        thread.run(lambda engine: None).result(WAIT_S)


def test_run_calls_between_steps_and_hands_back_results_and_errors() -> None:
    with running() as (thread, runner):
        assert thread.run(lambda engine: engine.config.num_blocks).result(WAIT_S) == 64
        assert thread.run(lambda engine: threading.current_thread().name).result(WAIT_S) == "chatkv-engine"
        with pytest.raises(ZeroDivisionError):
            thread.run(lambda engine: 1 / 0).result(WAIT_S)
        runner.gate.clear()
        inbox = Inbox()
        thread.submit(request("a"), inbox)
        assert runner.is_inside.wait(WAIT_S)
        waiting = thread.run(lambda engine: len(engine.scheduler.running))
        assert not waiting.done()
        runner.gate.set()
        assert waiting.result(WAIT_S) <= 1
        inbox.until_finished()
        thread.close()
        with pytest.raises(EngineClosedError):
            thread.run(lambda engine: None)


def test_calls_behind_a_failure_are_answered_and_the_tiers_are_closed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = FakeTier()
    with running(tier=tier) as (thread, runner):
        runner.gate.clear()
        inbox = Inbox()
        thread.submit(request("a", sampling=LONG), inbox)
        assert runner.is_inside.wait(WAIT_S)

        def fail(request_id: str) -> None:
            raise AssertionError("a broken invariant")

        monkeypatch.setattr(thread.engine, "cancel", fail)
        thread.cancel("a")
        answer = thread.run(lambda engine: "answered")
        runner.gate.set()
        assert answer.result(WAIT_S) == "answered"
        assert inbox.until_finished()[-1].finish_reason is FinishReason.ERROR
        thread.submit(request("b", sampling=LONG), inbox)
        thread.close()
    assert tier.is_closed
    assert sum(output.finish_reason is FinishReason.ERROR for output in inbox.outputs) == 2


def test_forgetting_through_the_thread_delivers_the_last_output_of_what_it_ends() -> None:
    with running() as (thread, _):
        inbox = Inbox()
        chat = GenerationRequest("a", prompt(60), LONG, owner="chat")
        thread.submit(chat, inbox)
        inbox.until(lambda outputs: any(output.token_ids for output in outputs))
        assert thread.run(lambda engine: engine.forget("chat")).result(WAIT_S).num_removed >= 3
        assert inbox.until_finished()[-1].finish_reason is FinishReason.CANCELLED
        assert thread.is_idle


def test_the_thread_sleeps_while_only_a_load_is_pending_and_wakes_when_something_has_come() -> None:
    tier = stored_chat()
    tier.is_prompt = False
    with running(tier=tier) as (thread, _):
        inbox = Inbox()
        thread.submit(request("a", 100), inbox)
        inbox.until(lambda outputs: bool(outputs))
        clock = time.pthread_getcpuclockid(thread._thread.ident)
        settle(thread)
        settled = time.clock_gettime(clock)
        threading.Event().wait(0.2)  # no condition to wait for: what is measured is that nothing happens
        assert time.clock_gettime(clock) - settled < 0.01
        assert thread.stats().num_loading == 1
        tier.jobs[0].deliver(6)
        outputs = inbox.until_finished()
        assert dict(outputs[-1].cached_by_tier) == {"disk": 96}
        assert [token for o in outputs for token in o.token_ids] == naive_answer(prompt(100), SHORT, 0, 512)[0]


def test_c5_a_load_that_hangs_is_given_up_by_the_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatkv.engine.loads.STALL_S", 0.05)
    tier = stored_chat()
    tier.is_prompt = False
    with running(tier=tier) as (thread, _):
        inbox = Inbox()
        thread.submit(request("a", 100), inbox)
        assert dict(inbox.until_finished()[-1].cached_by_tier) == {}


@pytest.mark.parametrize("drain", [False, True])
def test_close_during_a_load(drain: bool) -> None:
    tier = stored_chat()
    tier.is_prompt = False
    with running(tier=tier) as (thread, _):
        inbox = Inbox()
        thread.submit(request("a", 100), inbox)
        inbox.until(lambda outputs: bool(outputs))
        closer = threading.Thread(target=thread.close, kwargs={"drain": drain})
        closer.start()
        with thread._condition:
            assert thread._condition.wait_for(lambda: thread._is_closing, WAIT_S)
        if drain:
            tier.jobs[0].deliver(6)
        expected = FinishReason.LENGTH if drain else FinishReason.CANCELLED
        assert inbox.until_finished()[-1].finish_reason is expected
        closer.join(WAIT_S)
        assert tier.is_closed


def test_what_the_full_queue_skipped_is_stored_while_the_engine_is_idle() -> None:
    tier = FakeTier(queue_limit=1, is_prompt=False)
    with running(tier=tier) as (thread, _):
        inbox = Inbox()
        thread.submit(request("a", 100), inbox)
        inbox.until_finished()
        for num_stored in range(1, 7):
            settle(thread)
            assert len(tier.images) == num_stored
            tier.flush(1)
        settle(thread)
        assert thread.stats().tiers["disk"].num_blocks == 6


def test_a_warm_request_through_the_thread() -> None:
    with running() as (thread, _):
        inbox = Inbox()
        thread.submit(GenerationRequest("draft", prompt(100), SHORT, warm=WarmMode.COMPUTE), inbox)
        assert inbox.until_finished()[-1].finish_reason is FinishReason.STOP
        assert thread.count_cached(prompt(100)) == 96
        assert thread.is_idle
