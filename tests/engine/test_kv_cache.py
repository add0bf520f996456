"""What is reused, what is computed, and who holds which block: through the engine, as requests see it."""

from __future__ import annotations

import pytest
from harness import GREEDY_10, Harness, prompt

from chatkv.engine.batch import NO_SLOT
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.block_pool import BlockPool
from chatkv.engine.request import Priority, SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def test_b1_a_second_turn_computes_the_new_text_and_less_than_a_block() -> None:
    h = Harness()
    first = prompt(100)
    answer = h.ask("turn 1", first)
    second = first + tuple(answer.token_ids) + prompt(20, first=7)
    num_before = h.runner.num_tokens_run
    reply = h.ask("turn 2", second, ONE)
    # 100 + 9 tokens of turn 1 were computed (the last answer token never ran): 6 full blocks.
    assert reply.num_cached_tokens == 96
    assert reply.outputs[-1].cached_by_tier == {"device": 96}
    assert h.runner.num_tokens_run - num_before == len(second) - 96


def test_c12_answers_are_cached_too_and_each_block_once() -> None:
    h = Harness()
    long_answer = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    answer = h.ask("a", prompt(20), long_answer)
    assert len(h.engine.kv.tree.nodes()) == (20 + 59) // 16
    reply = h.ask("b", prompt(20) + tuple(answer.token_ids), ONE)
    assert reply.num_cached_tokens == 64
    assert len(h.engine.kv.tree.nodes()) == 80 // 16


def test_a_whole_prompt_hit_computes_one_token_and_writes_nothing() -> None:
    h = Harness()
    h.ask("a", prompt(64))
    num_before = h.runner.num_tokens_run
    reply = h.ask("b", prompt(64), ONE)
    assert reply.num_cached_tokens == 63
    assert h.runner.num_tokens_run - num_before == 1
    (sequence,) = h.last_batch.sequences
    assert list(sequence.slot_mapping) == [NO_SLOT]
    assert len(sequence.block_table) == 4


def test_a2_the_cache_is_global_and_a_second_chat_computes_what_differs() -> None:
    h = Harness()
    system = prompt(80)
    h.ask("a", system + prompt(30, first=2))
    reply = h.ask("b", system + prompt(30, first=3), ONE)
    assert reply.num_cached_tokens == 80


def test_five_chats_hold_their_common_head_once() -> None:
    h = Harness(num_blocks=80)
    system = prompt(320)
    for chat in range(5):
        h.add(f"{chat}", system + prompt(20, first=2 + chat), GREEDY_10)
    h.step()
    assert h.scheduled() == {"0": 32}, "the others wait for the blocks that the first one computes"
    while len(h.engine.scheduler.running) < 5:
        h.step()
    h.step()
    assert h.engine.stats().num_used <= 20 + 5 * 2
    h.run()
    assert h.engine.stats().num_computed_prompt_tokens == 320 + 5 * 20


def test_c1_equal_ids_under_different_parents_are_different_blocks() -> None:
    class Colliding(BlockHasher):
        def _digest(self, message: bytes) -> bytes:
            return b"same"

    h = Harness(hasher=Colliding(b"", CacheFingerprint(b"")))
    block = prompt(16)
    h.ask("a", prompt(16, first=2) + block)
    assert h.ask("b", prompt(16, first=3) + block, ONE).num_cached_tokens == 0
    assert h.ask("c", block + block, ONE).num_cached_tokens == 0
    assert h.ask("d", prompt(16, first=2) + block, ONE).num_cached_tokens == 31


def test_salts_share_nothing_and_a_miss_never_shows_another_ones_tokens() -> None:
    h = Harness()
    h.ask("a", prompt(40), cache_salt=b"alice")
    reply = h.ask("b", prompt(40), ONE, cache_salt=b"bob")
    assert reply.num_cached_tokens == 0
    miss = reply.outputs[-1].miss
    assert miss is not None
    assert (miss.position, miss.expected_token_ids) == (0, ())
    assert h.ask("c", prompt(40), ONE, cache_salt=b"alice").num_cached_tokens == 32


def test_a3_a_miss_names_the_first_differing_token_and_both_sides() -> None:
    h = Harness()
    h.ask("a", prompt(64))
    changed = list(prompt(64))
    changed[37] = 9
    miss = h.ask("b", tuple(changed), ONE).outputs[-1].miss
    assert miss is not None
    assert miss.position == 37
    assert miss.expected_token_ids == prompt(64)[37:48]
    assert miss.prompt_token_ids == tuple(changed[37:48])


def test_a_prompt_that_only_goes_on_misses_at_its_new_text() -> None:
    h = Harness()
    h.ask("a", prompt(48), ONE)
    miss = h.ask("b", prompt(70), ONE).outputs[-1].miss
    assert miss is not None
    assert (miss.position, miss.expected_token_ids) == (48, ())
    assert h.ask("c", prompt(70), ONE).outputs[-1].miss is None


def test_a10_another_context_length_keeps_the_names() -> None:
    small, large = Harness(max_context_tokens=100), Harness(max_context_tokens=400)
    for h in (small, large):
        h.ask("a", prompt(64))
    names = [{node.block_hash for node in h.engine.kv.tree.nodes()} for h in (small, large)]
    assert names[0] == names[1]


def test_c10_editing_makes_a_sibling_and_leaves_the_old_branch_whole() -> None:
    h = Harness()
    old = prompt(80)
    h.ask("a", old)
    edited = old[:40] + prompt(40, first=5)
    assert h.ask("b", edited).num_cached_tokens == 32
    assert h.ask("c", old, ONE).num_cached_tokens == 79
    assert h.ask("d", edited, ONE).num_cached_tokens == 79


def test_d5_two_chats_in_turn_compute_only_new_tokens() -> None:
    """A, B, A, B with a pool that holds both chats' heads, but not two whole contexts."""
    h = Harness(num_blocks=24, max_context_tokens=384)
    chats = {"a": prompt(60, first=1), "b": prompt(60, first=2)}
    for turn in range(4):
        for name, history in chats.items():
            num_before = h.runner.num_tokens_run
            answer = h.ask(f"{name}{turn}", history, GREEDY_10)
            num_run = h.runner.num_tokens_run - num_before
            if turn:
                assert num_run <= 25 + 15 + 9, "a turn computes its new text, less than one block, and its answer"
            chats[name] = history + tuple(answer.token_ids) + prompt(25, first=10 + turn)


def test_the_least_recently_used_chat_is_evicted_and_comes_back_right() -> None:
    h = Harness(num_blocks=12, max_context_tokens=192)
    chats = {name: prompt(60, first=index) for index, name in enumerate("abcd", start=1)}
    for name, token_ids in chats.items():
        h.ask(name, token_ids)
    assert h.ask("d2", chats["d"], ONE).num_cached_tokens == 48
    assert h.ask("a2", chats["a"], ONE).num_cached_tokens < 48
    assert h.ask("b2", chats["b"], ONE).num_cached_tokens < 48


def test_a_duplicate_is_swapped_for_the_published_block() -> None:
    """An interactive prompt does not wait for a background one that computes the same; one of both copies goes."""
    h = Harness(max_num_batched_tokens=64, tokens_per_s=4000)
    h.add("slow", prompt(200), GREEDY_10, priority=Priority.BACKGROUND)
    h.step()
    h.add("fast", prompt(200), GREEDY_10, priority=Priority.INTERACTIVE)
    h.run()
    for name in ("slow", "fast"):
        assert h.answers[name, 0].token_ids == h.expected(prompt(200))
    stats = h.engine.stats()
    assert stats.num_cached == 209 // 16, "each block is cached once"
    assert stats.num_computed_prompt_tokens <= 200 + 64, "whoever finds a block published goes on behind it"


def test_greedy_twins_end_up_in_the_same_blocks() -> None:
    h = Harness()
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    h.ask("head", prompt(32), ONE)
    h.add("left", prompt(40), sampling)
    h.add("right", prompt(40), sampling)
    for _ in range(50):
        h.step()
    assert h.engine.stats().num_used == (40 + 49) // 16 + 2, "all but the two tails are shared"
    h.run()


def test_blocks_go_back_tail_first(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    original = BlockPool.free

    def record(self: BlockPool, block_ids: list[int], is_used: bool = True) -> None:
        freed.extend(reversed(block_ids))
        original(self, block_ids, is_used)

    h = Harness()
    h.add("a", prompt(40))
    h.step()
    table = list(h.engine.scheduler.running[0].block_table)
    monkeypatch.setattr(BlockPool, "free", record)
    h.take(h.engine.cancel("a"))
    assert freed == table[::-1]
    assert len(table) > 1


def test_count_cached_touches_nothing() -> None:
    h = Harness()
    h.ask("a", prompt(70), ONE)
    assert h.engine.count_cached(prompt(70)) == 64
    assert h.engine.count_cached(prompt(70), b"salt") == 0
    assert h.engine.count_cached(prompt(15)) == 0
    assert h.engine.stats().num_used == 0
