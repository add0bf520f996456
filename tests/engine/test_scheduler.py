from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import GREEDY_10, Harness, prompt

from chatkv.engine.block_tree import BlockNode, BlockTree
from chatkv.engine.budget import TokenBudget
from chatkv.engine.errors import PromptTooLongError, QueueFullError
from chatkv.engine.request import Priority, RequestStatus, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def num_waiting(h: Harness) -> int:
    return len(h.engine.scheduler.waiting)


def test_a_prompt_is_read_in_whole_blocks_and_the_last_chunk_gives_a_token() -> None:
    h = Harness(max_num_batched_tokens=64)
    h.add("a", prompt(150))
    chunks = []
    while not h.answers.get(("a", 0)) or not h.answers["a", 0].token_ids:
        h.step()
        chunks.append(h.scheduled()["a"])
    assert sum(chunks) == 150
    assert all(chunk % 16 == 0 and chunk >= 16 for chunk in chunks[:-1])
    assert len(chunks) > 2


def test_a_batch_mixes_answers_and_prompts_and_answers_come_first() -> None:
    h = Harness()
    h.add("writer", prompt(10), LONG)
    h.step()
    h.add("reader", prompt(300, first=2))
    for _ in range(4):
        h.step()
        counts = h.scheduled()
        assert list(counts) == ["writer", "reader"]
        assert counts["writer"] == 1
        assert counts["reader"] >= 16


def test_a_pasted_book_never_freezes_another_chat() -> None:
    """300 tokens a second: while 4,000 tokens are read, the other chat's gaps stay within 500 ms."""
    h = Harness(
        num_blocks=300, max_context_tokens=4500, max_num_batched_tokens=512, tokens_per_s=300.0, target_step_s=0.25
    )
    h.add("chat", prompt(30), SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True))
    h.step()
    h.add("book", prompt(4000, first=2), GREEDY_10)
    gaps = []
    last_s = h.now_s
    while not h.answers.get(("book", 0)) or not h.answers["book", 0].token_ids:
        outputs = h.step()
        assert any(output.request_id == "chat" and output.token_ids for output in outputs)
        gaps.append(h.now_s - last_s)
        last_s = h.now_s
    assert max(gaps) <= 0.5
    assert sum(gaps) < 1.25 * 4000 / 300, "and the book is read at nearly full speed"


def test_a_new_chat_does_not_wait_for_a_book_to_end() -> None:
    h = Harness(num_blocks=300, max_context_tokens=4500, tokens_per_s=300.0)
    h.add("book", prompt(4000, first=2))
    for _ in range(5):
        h.step()
    h.add("chat", prompt(20))
    h.step()
    assert h.answers["chat", 0].token_ids


def test_several_prompts_are_read_at_the_same_pace() -> None:
    h = Harness(num_blocks=200, max_context_tokens=1000, max_num_batched_tokens=96)
    for index in range(3):
        h.add(f"{index}", prompt(700, first=index + 1))
    for _ in range(10):
        h.step()
    computed = [sequence.num_computed_tokens for sequence in h.engine.scheduler.running]
    assert max(computed) - min(computed) <= 32
    assert min(computed) > 200


def test_more_prompts_than_blocks_in_the_budget_take_turns() -> None:
    h = Harness(num_blocks=200, max_context_tokens=1000, max_num_batched_tokens=32)
    for index in range(5):
        h.add(f"{index}", prompt(300, first=index + 1))
    for _ in range(10):
        h.step()
    computed = [sequence.num_computed_tokens for sequence in h.engine.scheduler.running]
    assert max(computed) - min(computed) <= 16


def test_waiting_requests_start_by_priority_and_then_by_age() -> None:
    h = Harness(max_num_seqs=1)
    h.add("first", prompt(10))
    h.step()
    for name, priority in (
        ("title", Priority.BACKGROUND),
        ("editor", Priority.EDITOR),
        ("chat 1", Priority.INTERACTIVE),
        ("chat 2", Priority.INTERACTIVE),
    ):
        h.add(name, prompt(10), priority=priority)
    h.run()
    started = []
    for batch in h.runner.batches:
        started += [s.request_id for s in batch.sequences if s.request_id not in started]
    assert started == ["first", "chat 1", "chat 2", "editor", "title"]


def test_background_runs_from_what_is_left_and_slows_a_chat_by_one_block_at_most() -> None:
    h = Harness(num_blocks=100)
    h.add("side job", prompt(400, first=2), priority=Priority.BACKGROUND)
    h.step()
    assert h.scheduled()["side job"] > 16
    h.add("chat", prompt(10), LONG)
    for _ in range(3):
        h.step()
        assert h.scheduled()["side job"] <= 16
        assert h.scheduled()["chat"] >= 1


def test_a_chat_that_needs_room_takes_it_from_background_work() -> None:
    h = Harness(num_blocks=12, max_context_tokens=192)
    h.add("side job", prompt(120, first=2), priority=Priority.BACKGROUND)
    for _ in range(6):
        h.step()
    h.add("chat", prompt(150))
    h.step()
    assert "side job" not in h.scheduled()
    assert h.scheduled()["chat"] >= 16
    h.run()
    for name, token_ids in (("chat", prompt(150)), ("side job", prompt(120, first=2))):
        assert h.answers[name, 0].token_ids == h.expected(token_ids)


def test_background_is_not_admitted_and_thrown_out_again_while_a_chat_waits_for_room() -> None:
    h = Harness(num_blocks=12, max_context_tokens=192)
    h.add("chat 1", prompt(100), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    h.step()
    h.add("chat 2", prompt(150, first=2))
    h.add("side job", prompt(16, first=3), priority=Priority.BACKGROUND)
    while ("chat 1", 0) not in h.answers or h.answers["chat 1", 0].reason is None:
        h.step()
        assert set(h.scheduled()) == {"chat 1"}
    h.run()
    assert h.engine.stats().num_preemptions == 0


def test_a_request_is_admitted_only_if_its_whole_prompt_fits() -> None:
    h = Harness(num_blocks=12, max_context_tokens=192)
    h.add("a", prompt(100), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    h.step()
    h.add("b", prompt(100, first=2))
    while h.engine.has_unfinished and h.answers["a", 0].reason is None:
        h.step()
        assert "b" not in h.scheduled()
    h.run()
    assert h.engine.stats().num_preemptions == 0
    assert h.answers["b", 0].token_ids == h.expected(prompt(100, first=2))


def test_the_newest_of_the_lowest_priority_is_preempted_and_goes_on_with_the_same_answer() -> None:
    h = Harness(num_blocks=14, max_context_tokens=208)
    sampling = SamplingParams(seed=5, max_tokens=120, ignore_eos=True)
    names = {"old": Priority.INTERACTIVE, "new": Priority.INTERACTIVE, "editor": Priority.EDITOR}
    for index, (name, priority) in enumerate(names.items()):
        h.add(name, prompt(20, first=index + 1), sampling, priority=priority)
    preempted: list[str] = []
    while h.engine.has_unfinished:
        h.step()
        for sequence in h.engine.scheduler.waiting:
            assert sequence.status is RequestStatus.PREEMPTED
            assert sequence.output_token_ids, "its answer so far is kept"
            if sequence.request.request_id not in preempted:
                preempted.append(sequence.request.request_id)
    assert preempted[0] == "editor"
    assert "old" not in preempted
    for index, name in enumerate(names):
        answer = h.answers[name, 0]
        assert answer.token_ids == h.expected(prompt(20, first=index + 1), sampling)
        assert answer.num_cached_tokens == 0, "reading again after a preemption is no hit of the prompt"


def test_no_block_is_reserved_ahead() -> None:
    h = Harness(max_num_batched_tokens=32)
    h.add("a", prompt(200), LONG)
    for _ in range(40):
        h.step()
        (sequence,) = h.engine.scheduler.running
        assert len(sequence.block_table) == -(-sequence.num_computed_tokens // 16)
        assert sequence.num_unused_slots <= 15
    assert h.engine.stats().unused_slot_share <= 15 / 208


def test_the_queue_is_bounded_and_says_so() -> None:
    h = Harness(max_num_seqs=1, max_num_waiting=2)
    h.add("running", prompt(10))
    h.step()
    h.add("a", prompt(10))
    h.add("b", prompt(10))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        h.add("c", prompt(10))
    h.run()
    assert set(h.answers) == {("running", 0), ("a", 0), ("b", 0)}


@pytest.mark.parametrize(("num_blocks", "max_context_tokens", "limit"), [(4, 500, 64), (64, 100, 100)])
def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(
    num_blocks: int, max_context_tokens: int, limit: int
) -> None:
    h = Harness(num_blocks=num_blocks, max_context_tokens=max_context_tokens)
    with pytest.raises(PromptTooLongError) as caught:
        h.add("a", prompt(limit))
    assert (caught.value.num_prompt_tokens, caught.value.max_context_tokens) == (limit, limit)
    assert len(h.ask("b", prompt(limit - 1)).token_ids) == 1, "one less leaves room for one token"


def test_a_lone_request_may_use_the_whole_pool() -> None:
    h = Harness(num_blocks=4, max_context_tokens=500)
    answer = h.ask("a", prompt(30), LONG)
    assert len(answer.token_ids) == 64 - 30


def test_the_budget_follows_the_machine() -> None:
    budget = TokenBudget(512, target_step_s=0.25)
    assert budget.num_tokens == 32, "cautious before the first measurement"
    for _ in range(40):
        budget.record(budget.num_tokens, 0.02 + budget.num_tokens / 300)
    assert 0.2 < 0.02 + budget.num_tokens / 300 < 0.3
    settled = budget.num_tokens
    budget.record(1, 0.015)
    assert budget.num_tokens == settled, "a small step says nothing about large ones"
    budget.record(settled, 2.0)
    assert budget.num_tokens == 16, "a step far too long is believed at once"
    for _ in range(60):
        budget.record(budget.num_tokens, budget.num_tokens / 100_000)
    assert budget.num_tokens == 512


def test_a_waiting_twin_takes_the_blocks_of_the_first_one() -> None:
    h = Harness()
    h.add("a", prompt(200))
    h.step()
    h.add("b", prompt(200))
    h.step()
    assert set(h.scheduled()) == {"a"}
    assert num_waiting(h) == 1
    h.run()
    assert h.answers["b", 0].num_cached_tokens == 192


def test_who_waits_for_another_ones_prompt_looks_only_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(num_blocks=200, max_context_tokens=2500)
    for number in range(8):
        h.add(f"w{number}", prompt(2000))
    num_lookups = 0
    find = BlockTree.find

    def counted(self: BlockTree, *args: Any) -> BlockNode | None:
        nonlocal num_lookups
        num_lookups += 1
        return find(self, *args)

    while num_waiting(h) != 7 or h.engine.scheduler.running[0].num_computed_tokens < 1500:
        h.step()
    monkeypatch.setattr(BlockTree, "find", counted)
    h.engine.config = replace(h.engine.config, check_integrity=False)
    h.step()
    num_new_blocks = sum(h.scheduled().values()) // 16
    assert num_waiting(h) == 7
    assert 0 < num_lookups <= 8 * (2 * num_new_blocks + 2)
    h.run()
    assert all(h.answers[f"w{number}", 0].token_ids == h.expected(prompt(2000)) for number in range(8))


def test_who_waits_does_not_count_on_blocks_that_have_left() -> None:
    h = Harness(num_blocks=64, max_context_tokens=1024, max_num_seqs=1)
    h.ask("first", prompt(330), GREEDY_10)
    h.add("other", prompt(700, first=2), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    h.step()
    h.add("again", prompt(330))
    h.step()
    (waiting,) = h.engine.scheduler.waiting
    num_found = len(h.engine.kv.device_hit(waiting))
    assert num_found >= 20
    while len(h.engine.kv.device_hit(waiting)) == num_found:
        h.step()
    h.run()
    assert h.answers["again", 0].token_ids == h.expected(prompt(330))


def test_a_fast_machine_is_known_after_a_few_steps() -> None:
    """3 ms a step and 6,000 tokens a second: each step doubles the next one, and none is longer than wanted."""
    budget = TokenBudget(512, target_step_s=0.25)
    sizes = []
    for _ in range(6):
        sizes.append(budget.num_tokens)
        budget.record(sizes[-1], 0.003 + sizes[-1] / 6000)
    assert sizes == [32, 64, 128, 256, 512, 512]
