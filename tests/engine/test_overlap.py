"""The next step is scheduled and launched while the device works on the last one: what is known when, what is waited
for, and what becomes of rows and blocks of sequences that have ended in the air."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_harness import DeviceHarness
from fake_device import NOT_FINITE, FakeDevice
from fake_tier import FakeTier
from harness import GREEDY_10, prompt
from integer_runner import EOS_ID, held_ids, naive_answer, new_hasher
from test_engine_thread import WAIT_S, Inbox
from tier_harness import LONG, ONE, by_tier, evict_all

from chatkv.engine.batch import pending_id
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.engine_thread import EngineThread
from chatkv.engine.request import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    WarmMode,
)


def test_the_next_step_is_launched_before_the_last_one_is_taken() -> None:
    h = DeviceHarness()
    h.add("a", prompt(20))
    assert all(not output.token_ids for output in h.step())
    assert h.device.num_launched == 1
    for num_launched in range(2, 8):
        (output,) = h.step()
        assert h.device.num_launched == num_launched
        assert list(output.token_ids) == h.expected(prompt(20))[num_launched - 2 : num_launched - 1]
        assert list(h.last_batch.sequences[0].token_ids) == [pending_id(0)]
        assert h.last_batch.sequences[0].start_position == 20 + num_launched - 2
    h.settle()
    assert h.answers["a", 0].token_ids == h.expected(prompt(20))
    h.check_quiet()


def test_pending_ids_count_over_all_samples_of_the_step_before() -> None:
    h = DeviceHarness()
    h.add("a", prompt(10))
    h.add("b", prompt(10, first=2))
    h.step()
    h.step()
    ids = {sequence.request_id: list(sequence.token_ids) for sequence in h.last_batch.sequences}
    assert ids == {"a": [pending_id(0)], "b": [pending_id(1)]}


def test_a_prompt_in_chunks_does_not_wait_for_its_chunks() -> None:
    h = DeviceHarness(max_num_batched_tokens=32)
    h.add("a", prompt(100))
    h.step()
    h.step()
    assert h.device.num_launched == 2
    assert h.last_batch.sequences[0].start_position == 32
    assert h.engine.count_cached(prompt(100)) == 32, "the first chunk is over, the second is not"
    h.settle()
    assert h.answers["a", 0].token_ids == h.expected(prompt(100))
    h.check_quiet()


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
def test_no_row_is_run_behind_the_last_token_that_max_tokens_allows(max_tokens: int) -> None:
    h = DeviceHarness()
    h.ask("a", prompt(20), replace(GREEDY_10, max_tokens=max_tokens))
    assert h.device.num_tokens_run == 20 + max_tokens - 1
    h.check_quiet()


def test_no_row_is_run_behind_the_end_of_the_context() -> None:
    h = DeviceHarness(max_context_tokens=40)
    answer = h.ask("a", prompt(20), LONG)
    assert len(answer.token_ids) == 20
    assert h.device.num_tokens_run == 39
    h.check_quiet()


def test_a_stop_is_seen_one_step_late_and_the_row_in_the_air_is_dropped() -> None:
    h = DeviceHarness()
    sampling = next(
        sampling
        for seed in range(100)
        if 3 < len(h.expected(prompt(33), sampling := SamplingParams(seed=seed, max_tokens=60))) < 20
    )
    expected = h.expected(prompt(33), sampling)
    h.add("a", prompt(33), sampling)
    while ("a", 0) not in h.answers or h.answers["a", 0].reason is None:
        h.step()
    assert h.answers["a", 0].token_ids == expected
    assert h.answers["a", 0].reason is FinishReason.STOP
    assert h.engine.has_unfinished, "a row of it is in the air"
    held = sorted(h.engine.kv.pool.deferred_block_ids())
    assert len(held) == -(-(33 + len(expected)) // 16)
    assert h.engine.stats().num_used == len(held)
    assert h.step() == []
    assert h.device.num_tokens_run == 33 + len(expected)
    assert len(h.answers["a", 0].token_ids) == len(expected)
    h.check_quiet()


def test_the_blocks_of_who_has_stopped_may_be_hit_while_a_row_of_it_is_in_the_air() -> None:
    h = DeviceHarness()
    h.add("a", prompt(40), LONG)
    for _ in range(6):
        h.step()
    h.engine.cancel("a")
    assert list(h.engine.kv.pool.deferred_block_ids())
    answer = h.ask("b", prompt(40))
    assert answer.num_cached_tokens == 32
    h.check_quiet()


def test_draws_that_depend_on_the_last_token_wait_for_it() -> None:
    h = DeviceHarness()
    h.ask("a", prompt(20), replace(GREEDY_10, repetition_penalty=1.2))
    assert h.device.max_in_flight == 1
    h.check_quiet()


def test_a_ban_up_to_min_tokens_only_counts_tokens_and_waits_for_none() -> None:
    h = DeviceHarness()
    h.ask("a", prompt(20), SamplingParams(seed=3, max_tokens=20, min_tokens=10))
    assert h.device.max_in_flight == 2
    h.check_quiet()


@pytest.mark.parametrize("num_prompt_tokens", [1, 16, 30])
def test_choices_part_when_the_first_token_is_known(num_prompt_tokens: int) -> None:
    h = DeviceHarness()
    sampling = replace(LONG, max_tokens=20)
    h.add("a", prompt(num_prompt_tokens), sampling, n=3)
    h.step()
    h.step()
    expected = [h.expected(prompt(num_prompt_tokens), sampling, choice) for choice in range(3)]
    assert [h.answers["a", choice].token_ids for choice in range(3)] == [ids[:1] for ids in expected]
    h.settle()
    assert [h.answers["a", choice].token_ids for choice in range(3)] == expected
    assert h.device.max_in_flight == 2
    assert h.device.num_tokens_run == num_prompt_tokens + 3 * 19
    h.check_quiet()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_e2_a_cancel_in_the_air_gives_the_blocks_back_when_the_step_is_over(num_steps: int) -> None:
    h = DeviceHarness()
    h.add("stays", prompt(20, first=2), LONG)
    h.add("a", prompt(40), LONG)
    for _ in range(num_steps):
        h.step()
    num_cached = len(h.engine.kv.tree.nodes())
    h.take(h.engine.cancel("a"))
    h.engine.check_integrity()
    assert h.answers["a", 0].reason is FinishReason.CANCELLED
    h.step()
    stays = next(sequence for sequence in h.engine.scheduler.running)
    num_deferred = len(set(h.engine.kv.pool.deferred_block_ids()))
    assert h.engine.stats().num_used == len(stays.block_table), "what was freed in the air came back"
    assert num_deferred == 0
    assert len(h.engine.kv.tree.nodes()) >= num_cached
    h.take(h.engine.cancel("stays"))
    h.settle()
    h.check_quiet()


def test_a_request_id_may_be_used_again_while_a_row_of_the_old_one_is_in_the_air() -> None:
    h = DeviceHarness()
    h.add("a", prompt(20), LONG)
    h.step()
    h.step()
    h.engine.cancel("a")
    h.answers.clear()
    h.ask("a", prompt(20, first=2))
    h.check_quiet()


@pytest.mark.parametrize("n", [1, 2])
def test_numbers_that_are_not_finite_fail_one_request_and_its_row_in_the_air_is_dropped(n: int) -> None:
    h = DeviceHarness()
    h.add("good", prompt(20, first=2))
    h.add("bad", prompt(60), LONG, n=n)
    h.device.fails_sequence = lambda sequence: sequence.request_id == "bad"  # type: ignore[method-assign]
    h.step()
    h.step()
    assert h.answers["bad", 0].outputs[-1].error == NOT_FINITE
    assert {h.answers["bad", choice].reason for choice in range(n)} == {FinishReason.ERROR}
    h.settle()
    assert h.answers["good", 0].token_ids == h.expected(prompt(20, first=2))
    assert h.engine.count_cached(prompt(60)) == 0
    assert h.engine.stats().num_failed_requests == 1
    h.check_quiet()


def test_a_step_that_fails_fails_its_requests_and_others_go_on() -> None:
    h = DeviceHarness(max_num_seqs=2)
    for index, name in enumerate(("a", "b", "queued")):
        h.add(name, prompt(20, first=index + 1))
    h.step()
    h.step()
    h.device.fails_step = lambda batch: True  # type: ignore[method-assign]
    h.step()
    h.device.fails_step = lambda batch: False  # type: ignore[method-assign]
    h.settle()
    for index, name in enumerate(("a", "b")):
        answer = h.answers[name, 0]
        assert answer.outputs[-1].error == "The model runner failed: RuntimeError: the step failed"
        assert answer.token_ids == h.expected(prompt(20, first=index + 1))[: len(answer.token_ids)]
    assert h.answers["queued", 0].token_ids == h.expected(prompt(20, first=3))
    h.check_quiet()


def test_a_launch_that_fails_comes_after_the_results_of_the_step_before() -> None:
    h = DeviceHarness()
    h.add("a", prompt(20))
    h.step()
    h.step()
    h.device.fails_launch = lambda batch: True  # type: ignore[method-assign]
    h.step()
    h.device.fails_launch = lambda batch: False  # type: ignore[method-assign]
    h.settle()
    assert h.answers["a", 0].token_ids == h.expected(prompt(20))[:2]
    assert h.answers["a", 0].outputs[-1].error == "The model runner failed: RuntimeError: the launch failed"
    assert h.device.num_launched == 2, "nothing was launched behind it"
    h.ask("b", prompt(20, first=2))
    h.check_quiet()


@pytest.mark.parametrize("ends", ["reset", "close"])
def test_the_device_is_waited_for_before_its_blocks_lose_their_meaning(ends: str) -> None:
    h = DeviceHarness(tiers=[FakeTier()])
    h.add("a", prompt(40), LONG)
    for _ in range(3):
        h.step()
    assert h.device.unknown
    getattr(h.engine, ends)()
    assert not h.device.unknown
    assert not h.device.faults


def test_a_chat_that_is_deleted_in_the_air_leaves_no_bytes() -> None:
    disk = FakeTier()
    h = DeviceHarness(tiers=[disk])
    h.add("stays", prompt(40, first=3), LONG)
    h.add("a", prompt(40), LONG, owner="chat a")
    for _ in range(3):
        h.step()
    result = h.engine.forget("chat a")
    assert result.num_removed == 2
    h.engine.check_integrity()
    told = {slot[0] for slot in h.device.slots if slot is not None}
    assert not told & set(prompt(40))
    assert not any(set(copy.record.token_ids) & set(prompt(40)) for copy in disk.images)
    for _ in range(12):
        h.step()
    h.take(h.engine.cancel("stays"))
    h.settle()
    tokens = h.answers["stays", 0].token_ids
    assert tokens == h.expected(prompt(40, first=3), LONG)[: len(tokens)]
    assert len(tokens) > 10
    h.check_quiet()


def test_short_of_blocks_the_step_in_the_air_is_waited_for_before_anyone_is_preempted() -> None:
    h = DeviceHarness(num_blocks=9, max_context_tokens=144)
    for index in range(3):
        h.add(f"r{index}", prompt(30, first=index + 1), replace(LONG, max_tokens=40))
    h.settle()
    assert h.engine.stats().num_preemptions > 0
    for index in range(3):
        expected = h.expected(prompt(30, first=index + 1), replace(LONG, max_tokens=40))
        assert h.answers[f"r{index}", 0].token_ids == expected
    h.check_quiet()


def test_a_whole_prompt_that_is_cached_runs_its_last_token_alone() -> None:
    h = DeviceHarness()
    h.ask("a", prompt(64))
    num_before = h.device.num_tokens_run
    h.ask("b", prompt(64), replace(GREEDY_10, max_tokens=5))
    assert h.device.num_tokens_run - num_before == 5
    h.check_quiet()


def test_warm_work_is_done_when_its_blocks_are_known_to_be_computed() -> None:
    h = DeviceHarness()
    h.warm("w", prompt(100), WarmMode.COMPUTE)
    assert h.engine.count_cached(prompt(100)) == 96
    h.ask("a", prompt(100))
    assert h.answers["a", 0].num_cached_tokens == 96
    h.check_quiet()


# --- copies beside the steps -------------------------------------------------------------------------------------


def on_disk(**settings: int) -> tuple[DeviceHarness, FakeTier]:
    """The six blocks of prompt(96) lie on disk and nowhere else."""
    disk = FakeTier()
    h = DeviceHarness(tiers=[disk], **settings)  # type: ignore[arg-type]
    h.ask("old", prompt(96), ONE)
    h.settle()
    evict_all(h)
    return h, disk


def test_blocks_are_stored_when_their_copies_have_come_and_are_held_until_then() -> None:
    disk = FakeTier()
    h = DeviceHarness(tiers=[disk])
    h.device.stalled = frozenset({"read"})
    h.add("a", prompt(64), ONE)
    for _ in range(3):
        h.step()
    assert h.answers["a", 0].reason is FinishReason.LENGTH
    assert not disk.images, "the copies are under way"
    assert h.engine.stores.is_reading
    assert h.engine.stats().num_used == 4
    h.settle()
    assert len(disk.images) == 4
    h.check_quiet()


def test_steps_go_on_while_copies_are_under_way() -> None:
    disk = FakeTier()
    h = DeviceHarness(tiers=[disk])
    h.device.stalled = frozenset({"read"})
    h.add("a", prompt(100), LONG)
    for _ in range(12):
        h.step()
    assert len(h.answers["a", 0].token_ids) > 5
    assert not disk.images
    assert not h.device.faults


def test_no_more_is_copied_at_a_time_than_the_device_takes() -> None:
    disk = FakeTier()
    h = DeviceHarness(tiers=[disk])
    h.device.num_copies = 2
    h.ask("a", prompt(200), ONE)
    h.settle()
    assert len(disk.images) == 12
    evict_all(h)
    reply = h.ask("b", prompt(200), ONE)
    assert by_tier(reply) == {"disk": 192}
    h.settle()
    h.check_quiet()


def test_an_idle_engine_stores_all_and_then_sleeps_even_if_a_tier_refuses() -> None:
    host, disk = FakeTier("host", capacity=4), FakeTier("disk")
    h = DeviceHarness(tiers=[host, disk])
    h.ask("a", prompt(160), ONE)
    for copy in host.images:
        copy.num_pins += 1
    h.settle()
    assert len(disk.images) == 10
    assert len(host.images) == 4
    h.check_quiet()


def test_a_chat_comes_back_beside_the_steps_of_another() -> None:
    h, _ = on_disk()
    h.add("b", prompt(20, first=2), LONG)
    for _ in range(3):
        h.step()
    h.device.stalled = frozenset({"write"})
    h.add("a", prompt(100))
    for _ in range(4):
        h.step()
    loading = h.engine.scheduler.loading[0]
    assert loading.status is RequestStatus.LOADING
    assert loading.block_table == []
    assert len(list(h.engine.loads.reserved_block_ids())) == 6
    assert len(h.answers["b", 0].token_ids) > 4
    h.device.stalled = frozenset()
    h.device.max_pieces = 100
    for _ in range(20):
        h.step()
    assert h.answers["a", 0].token_ids == h.expected(prompt(100))
    assert by_tier(h.answers["a", 0]) == {"disk": 96}
    h.take(h.engine.cancel("b"))
    h.settle()
    h.check_quiet()


def test_an_idle_engine_waits_for_the_copies_of_a_load() -> None:
    h, _ = on_disk()
    h.add("a", prompt(100))
    num_steps = 0
    while h.answers.get(("a", 0)) is None or h.answers["a", 0].reason is None:
        h.step()
        num_steps += 1
    assert h.answers["a", 0].token_ids == h.expected(prompt(100))
    assert num_steps < 20
    h.settle()
    h.check_quiet()


@pytest.mark.parametrize("ends", ["cancel", "reset", "close", "forget"])
def test_c8_a_load_that_ends_early_waits_for_what_the_device_writes(ends: str) -> None:
    h, disk = on_disk()
    h.device.stalled = frozenset({"write"})
    h.add("b", prompt(20, first=2), LONG)
    h.step()
    h.add("a", prompt(100), owner="chat a")
    h.step()
    h.step()
    assert any(operation.stream == "write" for operation in h.device.unknown)
    match ends:
        case "cancel":
            h.take(h.engine.cancel("a"))
        case "forget":
            h.engine.forget("chat a", [node.block_hash for node in h.engine.kv.tree.nodes()])
        case _:
            getattr(h.engine, ends)()
    assert not any(operation.stream == "write" for operation in h.device.unknown)
    assert not h.device.faults
    assert not any(copy.num_readers for copy in disk.images)
    if ends == "cancel":
        h.take(h.engine.cancel("b"))
        h.settle()
        h.check_quiet()
        for node in h.engine.kv.tree.nodes():
            if node.device_block_id is not None:
                assert [slot and slot[0] for slot in held_ids(h.runner, node.device_block_id)] == list(node.token_ids)


def test_background_work_gives_way_when_the_step_in_the_air_is_over() -> None:
    h = DeviceHarness(num_blocks=8, max_context_tokens=128)
    h.add("side job", prompt(60, first=2), LONG, priority=Priority.BACKGROUND)
    for _ in range(3):
        h.step()
    h.add("a", prompt(100))
    for _ in range(30):
        h.step()
    assert h.answers["a", 0].token_ids == h.expected(prompt(100))
    h.take(h.engine.cancel("side job"))
    h.settle()
    h.check_quiet()


# --- the thread --------------------------------------------------------------------------------------------------


def test_the_engines_thread_on_a_device() -> None:
    device = FakeDevice(64, seed=1, max_pieces=3)
    config = EngineConfig(max_context_tokens=512, num_blocks=64, max_num_seqs=4, check_integrity=True)
    engine = Engine(
        config,
        device,
        new_hasher(),
        None,
        frozenset({EOS_ID}),
        poison=device.poison,
        tiers=[FakeTier()],
        images=device,
    )
    thread = EngineThread(engine)
    inboxes = [Inbox() for _ in range(8)]
    for index, inbox in enumerate(inboxes):
        sampling = LONG if index == 0 else GREEDY_10
        thread.submit(GenerationRequest(str(index), prompt(20 + index, first=index + 1), sampling), inbox)
    inboxes[0].until(lambda outputs: sum(len(output.token_ids) for output in outputs) > 5)
    thread.cancel("0")
    for index, inbox in enumerate(inboxes):
        outputs = inbox.until_finished()
        token_ids = [token for output in outputs for token in output.token_ids]
        expected, _ = naive_answer(prompt(20 + index, first=index + 1), LONG, 0, 512)
        assert token_ids == expected[: len(token_ids) if index == 0 else 10]
    thread.close()
    assert device.max_in_flight == 2
    assert not device.faults
    assert not device.unknown


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_fails_fails_all_requests_and_the_thread_goes_on(direction: str) -> None:
    device = FakeDevice(64, seed=1)
    config = EngineConfig(max_context_tokens=512, num_blocks=64)
    disk = FakeTier()
    engine = Engine(config, device, new_hasher(), None, frozenset({EOS_ID}), tiers=[disk], images=device)
    thread = EngineThread(engine)

    def answer(request_id: str, token_ids: tuple[int, ...]) -> list[RequestOutput]:
        inbox = Inbox()
        thread.submit(GenerationRequest(request_id, token_ids, GREEDY_10), inbox)
        return inbox.until_finished()

    def start_anew(engine: Engine) -> None:
        engine._settle()
        engine.reset()
        for block_id in range(64):
            device.poison(block_id)

    if direction == "load":
        answer("old", prompt(100))
        thread.run(start_anew).result(WAIT_S)
    device.fails_copy = lambda: True  # type: ignore[method-assign]
    outputs = answer("a", prompt(100))
    assert "the copy failed" in (outputs[-1].error or "")
    assert bool(disk.num_loaded) == (direction == "load")
    device.fails_copy = lambda: False  # type: ignore[method-assign]
    thread.run(start_anew).result(WAIT_S)
    outputs = answer("b", prompt(30))
    assert [token for output in outputs for token in output.token_ids] == naive_answer(prompt(30), GREEDY_10, 0, 512)[0]
    thread.close()
    assert not device.unknown
    assert device.num_unreleased == {"read": 0, "write": 0}
    assert not any(copy.num_readers for copy in disk.images)
