"""Blocks that come back from lower tiers: what is matched, what is loaded, and what a load may never do."""

from __future__ import annotations

import pytest
from fake_tier import FakeTier
from harness import GREEDY_10, Harness, prompt
from integer_runner import held_ids
from tier_harness import LONG, ONE, by_tier, evict_all, only_on_disk

from chatkv.engine.block_tree import BlockNode
from chatkv.engine.request import FinishReason, Priority, RequestStatus, SamplingParams


def test_a_chat_comes_back_from_disk_and_computes_its_new_tokens_only() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    first = h.ask("a", prompt(100))
    evict_all(h)
    assert h.engine.count_cached(prompt(100)) == 0
    second = prompt(100) + tuple(first.token_ids) + prompt(20, first=7)
    num_before = h.runner.num_tokens_run
    reply = h.ask("b", second, ONE)
    assert h.runner.num_tokens_run - num_before == len(second) - 96
    assert by_tier(reply) == {"disk": 96}
    load = reply.outputs[-1].load
    assert load is not None
    assert (load.num_tokens, load.num_loaded_tokens, load.is_loaded) == (96, 96, True)
    assert h.engine.stats().num_hit_tokens_by_tier == {"disk": 96}


def test_b3_one_chain_may_lie_in_three_tiers() -> None:
    host, disk = FakeTier("host", capacity=4), FakeTier("disk")
    h = Harness(tiers=[host, disk])
    h.ask("a", prompt(112), ONE)
    nodes = sorted(h.engine.kv.tree.nodes(), key=lambda node: node.position)
    assert [node.host_copy is not None for node in nodes] == [True] * 4 + [False] * 3
    for node in reversed(nodes[2:]):
        h.engine.kv.pool.drop(node)
    h.engine.check_integrity()
    assert h.engine.place_tokens(prompt(112)).num_by_run == [("device", 2), ("host", 2), ("disk", 3)]
    reply = h.ask("b", prompt(130), ONE)
    assert by_tier(reply) == {"device": 32, "host": 32, "disk": 48}


def test_a_whole_prompt_on_disk_computes_one_token() -> None:
    h = Harness(tiers=[FakeTier()])
    h.ask("a", prompt(64))
    evict_all(h)
    num_before = h.runner.num_tokens_run
    reply = h.ask("b", prompt(64), ONE)
    assert by_tier(reply) == {"disk": 63}
    assert h.runner.num_tokens_run - num_before == 1


def test_d5_two_chats_larger_than_the_pool_compute_new_tokens_only() -> None:
    disk = FakeTier()
    h = Harness(num_blocks=18, max_context_tokens=288, tiers=[disk])
    chats = {"a": prompt(150, first=1), "b": prompt(150, first=2)}
    for turn in range(10):
        for name, history in chats.items():
            num_before = h.runner.num_tokens_run
            answer = h.ask(f"{name}{turn}", history, GREEDY_10)
            num_run = h.runner.num_tokens_run - num_before
            if turn:
                assert num_run <= 10 + 15 + 9, "new text, less than one block, and the answer"
            chats[name] = history + tuple(answer.token_ids)
    assert set(disk.num_written.values()) == {1}, "each block was written once"
    assert h.engine.stats().num_hit_tokens_by_tier["disk"] > 1000


def test_a_load_never_stalls_the_batch() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk], tokens_per_s=10)
    h.ask("old", prompt(96), ONE)
    evict_all(h)
    h.add("chat", prompt(20, first=5), LONG)
    h.step()
    disk.is_prompt = False
    h.add("loading", prompt(100), ONE)
    for num_steps in range(1, 6):
        h.step()
        assert set(h.scheduled()) == {"chat"}
        assert len(h.engine.scheduler.loading) == 1
        (job,) = disk.jobs
        assert len(h.engine.scheduler.loading[0].nodes) == num_steps - 1, "blocks are published as they come"
        job.deliver()
    progress = h.answers["loading", 0].outputs[-1].progress
    assert progress is not None
    assert progress.status is RequestStatus.LOADING
    assert progress.num_computed_tokens > 0
    job.deliver(6)
    h.step()
    assert "loading" in h.scheduled()
    assert by_tier(h.answers["loading", 0]) == {"disk": 96}


def test_copies_into_the_pool_are_bounded_while_others_run() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk], max_copy_bytes=2 * 256)
    h.add("old", prompt(96), ONE)
    h.run()
    for _ in range(5):
        h.step()
    evict_all(h)
    h.add("chat", prompt(20, first=5), LONG)
    h.step()
    h.add("loading", prompt(96), ONE)
    h.step()
    placed = []
    while h.engine.scheduler.loading:
        placed.append(len(h.engine.scheduler.loading[0].nodes))
        h.step()
    assert placed == [0, 2, 4]
    h.take(h.engine.cancel("chat"))
    h.run()
    assert h.answers["loading", 0].token_ids == h.expected(prompt(96), ONE)


@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_a_failed_load_keeps_its_good_leading_part_and_computes_the_rest(num_good: int) -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("a", prompt(100), ONE)
    h.step()
    (job,) = disk.jobs
    job.deliver(num_good)
    disk.lose(job.copies[num_good])
    job.deliver()
    disk.is_prompt = True
    num_before = h.runner.num_tokens_run
    h.run()
    assert h.runner.num_tokens_run - num_before == 100 - 16 * num_good
    answer = h.answers["a", 0]
    assert answer.token_ids == h.expected(prompt(100), ONE)
    assert sum(by_tier(answer).values()) == 16 * num_good
    load = answer.outputs[-1].load
    assert load is not None
    assert load.num_loaded_tokens == 16 * num_good
    assert h.engine.stats().num_used == 0
    assert len(disk.copies()) == 6, "what was lost and computed again is stored again"


def test_c5_a_hung_read_is_given_up_and_writes_nothing_when_it_returns() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("a", prompt(100), LONG)
    h.step()
    (job,) = disk.jobs
    job.deliver(2)
    h.step()
    assert h.engine.wait_s is not None
    h.now_s += h.engine.wait_s + 0.1
    h.step()
    assert h.scheduled() == {"a": 64}
    assert job.is_cancelled
    before = list(h.runner.slots)
    job.deliver(4)
    assert h.runner.slots == before
    h.step()
    assert by_tier(h.answers["a", 0]) == {"disk": 32}
    h.take(h.engine.cancel("a"))


def test_e2_a_cancel_during_a_load_frees_all_and_writes_nothing() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("a", prompt(100), LONG, n=2)
    h.step()
    (job,) = disk.jobs
    job.deliver(2)
    h.step()
    job.deliver(1)
    outputs = h.take(h.engine.cancel("a"))
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED] * 2
    h.engine.check_integrity()
    assert h.engine.stats().num_used == h.engine.stats().num_loading == 0
    before = list(h.runner.slots)
    job.deliver(3)
    assert h.step() == []
    assert h.runner.slots == before
    assert not h.engine.has_unfinished
    assert h.engine.count_cached(prompt(96)) == 32, "what had come stays"


def test_others_whose_next_block_is_being_loaded_wait_for_it() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("slow", prompt(100), ONE, priority=Priority.BACKGROUND)
    h.step()
    h.add("fast", prompt(96) + prompt(10, first=3), ONE)
    h.step()
    assert len(disk.jobs) == 1
    assert [s.request.request_id for s in h.engine.scheduler.waiting] == ["fast"]
    disk.jobs[0].deliver(6)
    h.run()
    assert disk.num_loaded == 6
    assert by_tier(h.answers["fast", 0]) == {"device": 96}


def test_a_preempted_sequence_comes_back_by_a_load() -> None:
    disk = FakeTier()
    h = Harness(num_blocks=14, max_context_tokens=208, tiers=[disk])
    sampling = SamplingParams(seed=5, max_tokens=120, ignore_eos=True)
    for index in range(3):
        h.add(f"{index}", prompt(20, first=index + 1), sampling)
    h.run()
    stats = h.engine.stats()
    assert stats.num_preemptions > 0
    assert disk.num_loaded > 0
    for index in range(3):
        assert h.answers[f"{index}", 0].token_ids == h.expected(prompt(20, first=index + 1), sampling)
        assert by_tier(h.answers[f"{index}", 0]) == {}, "coming back is no hit of the prompt"


def test_what_loads_reserve_counts_as_committed() -> None:
    disk = FakeTier()
    h = Harness(num_blocks=12, max_context_tokens=192, tiers=[disk])
    h.ask("old", prompt(96), ONE)
    evict_all(h)
    disk.is_prompt = False
    h.add("loading", prompt(96), GREEDY_10)
    h.step()
    h.add("new", prompt(90, first=2), GREEDY_10)
    h.step()
    assert [s.request.request_id for s in h.engine.scheduler.waiting] == ["new"]
    disk.jobs[0].deliver(6)
    h.run()
    assert h.engine.stats().num_preemptions == 0


def test_all_hits_are_touched_in_their_tiers_before_room_is_made() -> None:
    disk = FakeTier(capacity=8)
    h = Harness(num_blocks=10, max_context_tokens=160, tiers=[disk])
    h.ask("a", prompt(96), ONE)
    for node in sorted(h.engine.kv.tree.nodes(), key=lambda node: -node.position)[:4]:
        h.engine.kv.pool.drop(node)
    h.ask("b", prompt(140), ONE)
    nodes = list(h.engine.kv.tree.chain(h.answers["a", 0].outputs[-1].block_hashes))
    assert len(nodes) == 6
    assert all(disk.touched[node.block_hash] == 1 for node in nodes)


def test_c11_a_tier_that_is_off_by_one_fails_these_tests() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(96), ONE)
    evict_all(h)
    disk.shift = 1
    with pytest.raises(AssertionError):
        h.ask("b", prompt(100), ONE)
    assert "position 0 holds" in str(h.answers["b", 0].outputs[-1].error)


def test_a_loaded_block_holds_what_was_stored() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(96), ONE)
    evict_all(h)
    h.ask("b", prompt(100), ONE)
    for node in h.engine.kv.tree.nodes():
        assert_content(h, node)


def assert_content(h: Harness, node: BlockNode) -> None:
    assert node.device_block_id is not None
    first = node.position * 16
    expected = [(token, first + offset) for offset, token in enumerate(node.token_ids)]
    assert held_ids(h.runner, node.device_block_id) == expected


def test_b5_a_new_engine_on_the_same_tier_finds_everything() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    first = h.ask("a", prompt(100))
    later = Harness(tiers=[disk])
    reply = later.ask("b", prompt(100) + tuple(first.token_ids) + (1, 2), ONE)
    assert by_tier(reply) == {"disk": 96}
    assert set(disk.num_written.values()) == {1}


def test_a_reset_engine_forgets_the_device_and_keeps_the_lower_tiers() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), owner="chat")
    h.engine.set_pinned("chat", (), is_pinned=True)
    disk.is_prompt = False
    h.add("b", prompt(100), LONG)
    h.step()
    h.engine.reset()
    h.answers.clear()
    assert [copy.num_pins for copy in disk.copies()] == [1] * 6
    disk.is_prompt = True
    for block in h.engine.kv.pool.blocks:
        h.runner.poison(block.block_id)
    assert by_tier(h.ask("b", prompt(100), ONE)) == {"disk": 96}
    h.engine.set_pinned("chat", (), is_pinned=False)
    assert [copy.num_pins for copy in disk.copies()] == [0] * 6


def test_a_copy_that_is_lost_between_the_match_and_the_read_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    h, disk = only_on_disk()
    take_hits = h.engine.kv.take_hits

    def lose_first(*args) -> None:  # type: ignore[no-untyped-def]
        for copy in [copy for copy in disk.images if copy.record.position == 2]:
            disk.lose(copy)
        take_hits(*args)

    monkeypatch.setattr(h.engine.kv, "take_hits", lose_first)
    assert by_tier(h.ask("b", prompt(100), ONE)) == {"disk": 32}


def test_blocks_without_an_owner_are_not_forgotten_by_accident() -> None:
    h = Harness()
    h.add("a", prompt(40), LONG)
    h.step()
    with pytest.raises(AssertionError, match="nobody's"):
        h.engine.forget("")
    h.take(h.engine.cancel("a"))
