"""Work in advance: it brings or computes full blocks, answers nobody, and takes nothing from anybody."""

from __future__ import annotations

import pytest
from fake_tier import FakeTier
from harness import GREEDY_10, Harness, prompt
from tier_harness import LONG, ONE, by_tier, evict_all, only_on_disk

from chatkv.engine.request import FinishReason, RequestStatus, WarmMode


def test_an_opened_chat_is_loaded_and_computes_nothing() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(100), ONE)
    evict_all(h)
    num_before = h.runner.num_tokens_run
    answer = h.warm("open", prompt(150), WarmMode.LOAD)
    assert h.runner.num_tokens_run == num_before
    assert by_tier(answer) == {"disk": 96}
    assert h.engine.stats().num_prefix_hit_tokens == 0, "work in advance is no hit"
    assert by_tier(h.ask("b", prompt(150), ONE)) == {"device": 96}


def test_a_turns_own_warm_up_does_not_change_the_hit_rate() -> None:
    h = Harness()
    answer = h.ask("a", prompt(100), owner="chat")
    before = h.engine.stats()
    h.warm("after", prompt(100) + tuple(answer.token_ids) + prompt(40, first=3), WarmMode.COMPUTE, owner="chat")
    after = h.engine.stats()
    assert after.num_computed_prompt_tokens > before.num_computed_prompt_tokens
    assert after.num_prefix_query_tokens == before.num_prefix_query_tokens == 100
    assert after.num_hit_tokens_by_tier == before.num_hit_tokens_by_tier == {}


def test_a_draft_is_computed_in_full_blocks_and_enter_finds_them() -> None:
    h = Harness()
    answer = h.warm("draft", prompt(100), WarmMode.COMPUTE)
    assert h.runner.num_tokens_run == 96
    assert by_tier(answer) == {}
    assert all(not spec for batch in h.runner.batches for s in batch.sequences for spec in s.samples)
    assert by_tier(h.ask("enter", prompt(110), ONE)) == {"device": 96}


def test_what_lower_tiers_hold_is_loaded_and_the_rest_computed() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(64), ONE)
    evict_all(h)
    num_before = h.runner.num_tokens_run
    answer = h.warm("next", prompt(128), WarmMode.COMPUTE)
    assert by_tier(answer) == {"disk": 64}
    assert h.runner.num_tokens_run - num_before == 64


@pytest.mark.parametrize("mode", list(WarmMode))
def test_a_warm_request_with_nothing_to_do_ends_at_once(mode: WarmMode) -> None:
    h = Harness(tiers=[FakeTier()])
    h.ask("a", prompt(96), ONE)
    for index, token_ids in enumerate((prompt(15), prompt(96), prompt(100))):
        h.add(f"{index}", token_ids, warm=mode)
        (output,) = h.step()
        assert output.finish_reason is FinishReason.STOP
    assert not h.engine.has_unfinished
    assert h.engine.stats().num_used == 0


def test_a_load_without_anything_stored_computes_nothing() -> None:
    h = Harness(tiers=[FakeTier()])
    h.warm("a", prompt(100), WarmMode.LOAD)
    assert h.runner.num_tokens_run == 0


def test_it_yields_within_one_chunk_and_slows_a_chat_by_one_block() -> None:
    h = Harness(num_blocks=64)
    h.add("draft", prompt(300), warm=WarmMode.COMPUTE)
    h.step()
    assert h.scheduled()["draft"] > 16
    h.add("chat", prompt(10, first=2), LONG)
    for _ in range(3):
        h.step()
        assert h.scheduled()["chat"] >= 1
        assert h.scheduled()["draft"] <= 16
    h.take(h.engine.cancel("chat"))
    h.take(h.engine.cancel("draft"))
    assert h.engine.count_cached(prompt(300)) > 0, "what was computed stays"


@pytest.mark.parametrize("mode", list(WarmMode))
def test_it_never_evicts_what_was_used_in_the_last_ten_minutes(mode: WarmMode) -> None:
    disk = FakeTier()
    h = Harness(num_blocks=16, max_context_tokens=256, tiers=[disk])
    h.ask("old", prompt(96, first=2), ONE)
    evict_all(h)
    h.ask("recent", prompt(200), ONE)
    assert by_tier(h.ask("still there", prompt(200), ONE)) == {"device": 192}
    answer = h.warm("a", prompt(96, first=2), mode)
    assert by_tier(answer) == {"disk": 64}, "as far as blank blocks go"
    assert h.engine.count_cached(prompt(200)) == 192
    h.now_s += 601
    h.warm("b", prompt(96, first=2), mode)
    assert h.engine.count_cached(prompt(96, first=2)) == 96
    assert h.engine.count_cached(prompt(200)) < 192


def test_a_long_draft_stops_where_it_would_evict() -> None:
    h = Harness(num_blocks=16, max_context_tokens=256)
    h.ask("recent", prompt(100), ONE)
    h.warm("draft", prompt(250, first=2), WarmMode.COMPUTE)
    assert h.engine.count_cached(prompt(100)) == 96
    assert h.engine.count_cached(prompt(250, first=2)) == 160


def test_it_gives_way_to_a_chat_that_needs_the_room() -> None:
    disk = FakeTier()
    h = Harness(num_blocks=16, max_context_tokens=256, tiers=[disk])
    h.ask("old", prompt(200, first=2), ONE)
    evict_all(h)
    disk.is_prompt = False
    h.add("open", prompt(200, first=2), warm=WarmMode.LOAD)
    h.step()
    assert h.engine.stats().num_loading == 1
    h.add("chat", prompt(200), GREEDY_10)
    h.step()
    assert h.scheduled()["chat"] > 0
    h.run()
    assert h.answers["open", 0].reason is FinishReason.STOP
    assert h.answers["chat", 0].token_ids == h.expected(prompt(200))


def test_enter_during_the_load_of_the_opened_chat_waits_for_it() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("open", prompt(96), warm=WarmMode.LOAD)
    h.step()
    disk.jobs[0].deliver(2)
    h.add("enter", prompt(110), ONE)
    h.step()
    assert h.engine._active.by_id["enter"].sequences[0].status is RequestStatus.WAITING
    disk.jobs[0].deliver(4)
    h.run()
    assert by_tier(h.answers["enter", 0]) == {"device": 96}
    assert disk.num_loaded == 6


def test_a_cancelled_warm_load_keeps_what_came() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("open", prompt(96), warm=WarmMode.LOAD)
    h.step()
    disk.jobs[0].deliver(2)
    h.step()
    (output,) = h.take(h.engine.cancel("open"))
    assert output.finish_reason is FinishReason.CANCELLED
    assert h.engine.count_cached(prompt(96)) == 32
    assert h.engine.stats().num_used == 0


def test_a_failed_warm_load_ends() -> None:
    h, disk = only_on_disk()
    disk.is_prompt = False
    h.add("open", prompt(96), warm=WarmMode.LOAD)
    h.step()
    disk.jobs[0].fail()
    h.run()
    assert h.answers["open", 0].reason is FinishReason.STOP
    assert h.engine.stats().num_used == 0
