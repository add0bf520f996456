"""A deleted chat leaves every tier and the pool's bytes; what others hold stays; an idle one leaves the device."""

from __future__ import annotations

from fake_tier import FakeTier
from harness import GREEDY_10, Harness, prompt
from integer_runner import IntegerImages
from test_loads import LONG, ONE, by_tier, evict_all

from chatkv.engine.request import FinishReason, WarmMode


def all_ids(h: Harness) -> set[int]:
    """Every token id that any byte of the pool still tells."""
    return {slot[0] for slot in h.runner.slots if slot is not None}


class NoPoison(Harness):
    """The pool as in production: what is freed keeps its bytes until somebody wipes it."""

    def __init__(self, **settings) -> None:  # type: ignore[no-untyped-def]
        super().__init__(**settings)
        self.engine._poison = None
        self.engine.reset()

        def write(images: IntegerImages, block_id: int, image: memoryview) -> None:
            images._runner.slots[block_id * 16 : (block_id + 1) * 16] = [None] * 16
            IntegerImages.write(images, block_id, image)

        class Images(IntegerImages):
            def write(self, block_id: int, image: memoryview) -> None:
                write(self, block_id, image)

        self.engine._images = Images(self.runner)


def test_a_deleted_chat_is_gone_from_every_tier_and_its_neighbour_stays() -> None:
    host, disk = FakeTier("host"), FakeTier("disk")
    h = Harness(tiers=[host, disk])
    system = prompt(48)
    h.ask("a", system + prompt(50, first=2), owner="chat a")
    h.ask("b", system + prompt(50, first=3), owner="chat b")
    result = h.engine.forget("chat a")
    h.engine.check_integrity()
    assert result == (3, 3)
    assert h.engine.count_cached(system + prompt(50, first=2)) == 48
    assert h.engine.count_cached(system + prompt(50, first=3)) == 96
    for tier in (host, disk):
        assert {copy.record.position for copy in tier.images} == set(range(6))
        assert not any(set(copy.record.token_ids) & set(prompt(50, first=2)) for copy in tier.images)
    assert h.engine.forget("chat b") == (6, 0)
    assert not disk.images
    assert not host.images
    assert h.engine.kv.tree.nodes() == []


def test_what_memory_does_not_know_is_forgotten_by_name() -> None:
    disk = FakeTier()
    first = Harness(tiers=[disk])
    names_a = first.ask("a", prompt(48) + prompt(50, first=2), owner="a").outputs[-1].block_hashes
    names_b = first.ask("b", prompt(48) + prompt(50, first=3), owner="b").outputs[-1].block_hashes
    assert len(names_a) == len(names_b) == 6
    h = Harness(tiers=[disk])
    assert h.engine.forget("a") == (0, 0), "nobody has held anything yet"
    assert h.engine.forget("a", names_a, shared=set(names_a) & set(names_b)) == (3, 3)
    assert {copy.record.block_hash for copy in disk.images} == set(names_b)


def test_variants_below_that_nobody_else_owns_go_too() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(64), owner="a")
    h.ask("anonymous", prompt(64) + prompt(40, first=5))
    h.engine.forget("a")
    assert h.engine.kv.tree.nodes() == []
    assert not disk.images


def test_a_block_that_a_running_request_holds_stays_and_counts_as_shared() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("a", prompt(96), owner="a")
    h.add("b", prompt(64) + prompt(20, first=4), LONG)
    h.step()
    result = h.engine.forget("a")
    h.engine.check_integrity()
    assert result == (2, 4)
    for _ in range(5):
        h.step()
    h.take(h.engine.cancel("b"))


def test_a_block_on_its_way_for_another_chat_stays() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    names = h.ask("a", prompt(96), ONE, owner="a").outputs[-1].block_hashes
    evict_all(h)
    disk.is_prompt = False
    h.add("b", prompt(96), ONE, owner="b")
    h.step()
    assert h.engine.forget("a", names) == (0, 6)
    disk.jobs[0].deliver(6)
    h.run()
    assert by_tier(h.answers["b", 0]) == {"disk": 95}


def test_the_chats_own_request_ends_first() -> None:
    h = Harness(tiers=[FakeTier()])
    h.add("a", prompt(96), LONG, owner="a")
    for _ in range(6):
        h.step()
    assert h.engine.forget("a") == (6, 0)
    assert h.engine.has_unfinished, "its last output is yet to be delivered"
    (output,) = h.step()
    assert output.finish_reason is FinishReason.CANCELLED
    assert not h.engine.has_unfinished
    assert h.engine.kv.tree.nodes() == []


def test_queued_writes_of_a_forgotten_chat_never_happen() -> None:
    disk = FakeTier(is_prompt=False)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(96), owner="a")
    assert len(disk.queued) == 6
    h.engine.forget("a")
    assert disk.queued == []
    disk.flush(1)
    assert h.step() == []
    assert h.engine.kv.tree.nodes() == []


def test_nothing_of_a_forgotten_chat_remains_in_the_pool() -> None:
    h = NoPoison(tiers=[FakeTier()])
    planted = prompt(100, first=7)
    h.ask("a", planted, owner="a")
    h.ask("b", prompt(60), owner="b")
    assert set(planted) & all_ids(h)
    h.engine.forget("a")
    assert not set(planted) & all_ids(h), "not even the tail, which never became a block"
    assert set(prompt(48)) <= all_ids(h)


def test_drop_all_leaves_what_runs() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("old", prompt(96, first=2), owner="old")
    h.add("a", prompt(96), LONG, owner="a")
    for _ in range(4):
        h.step()
    result = h.engine.drop_all()
    h.engine.check_integrity()
    assert result == (6, 6)
    assert h.engine.count_cached(prompt(96, first=2)) == 0
    for _ in range(20):
        h.step()
    h.take(h.engine.cancel("a"))
    assert h.engine.drop_all().num_shared == 0
    assert not disk.images
    assert h.engine.kv.tree.nodes() == []


def test_offload_drops_device_copies_that_a_lower_tier_has() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    names = h.ask("a", prompt(96), owner="a").outputs[-1].block_hashes
    h.ask("b", prompt(32) + prompt(40, first=3), owner="b")
    disk.is_refusing = True
    h.ask("c", prompt(96) + prompt(40, first=4), owner="c")
    assert h.engine.offload(names) == 0, "blocks of another chat hang on all of them"
    h.engine.forget("c")
    assert h.engine.offload(names) == 4
    h.engine.check_integrity()
    assert h.engine.place(names).num_by_run == [("device", 2), ("disk", 4)]
    assert by_tier(h.ask("again", prompt(96), ONE)) == {"device": 32, "disk": 63}


def test_pins_follow_the_chat() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    system = prompt(48)
    h.ask("a", system, GREEDY_10, owner="a")
    h.engine.set_pinned("a", (), is_pinned=True)
    h.ask("a2", system + prompt(50, first=2), owner="a")
    names_b = h.ask("b", system + prompt(50, first=3), owner="b").outputs[-1].block_hashes
    pins = {copy.record.block_hash: copy.num_pins for copy in disk.images}
    assert sorted(pins.values()) == [0] * 3 + [1] * 6
    h.engine.set_pinned("b", names_b, is_pinned=True)
    assert [copy.num_pins for copy in disk.copies()[:3]] == [2, 2, 2]
    h.engine.set_pinned("a", (), is_pinned=False)
    pins = {copy.record.block_hash: copy.num_pins for copy in disk.images}
    assert {name for name, num in pins.items() if num == 1} == set(names_b)
    assert sum(pins.values()) == 6
    h.engine.forget("b", names_b)
    h.engine.check_integrity()


def test_the_blocks_of_a_transient_request_never_reach_a_lower_tier() -> None:
    host, disk = FakeTier("host"), FakeTier("disk")
    h = Harness(num_blocks=12, max_context_tokens=192, tiers=[host, disk])
    planted = prompt(100, first=9)
    h.warm("draft", planted, WarmMode.COMPUTE, owner="a", is_transient=True)
    h.ask("private", planted + prompt(20, first=8), owner="p", is_transient=True)
    h.ask("other", prompt(150), ONE)
    h.engine.close()
    for tier in (host, disk):
        assert tier.is_closed
        assert len(tier.images) == 9
        assert not any(set(copy.record.token_ids) & set(planted + prompt(20, first=8)) for copy in tier.images)


def test_a_draft_that_was_sent_is_stored() -> None:
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.warm("draft", prompt(100), WarmMode.COMPUTE, owner="a", is_transient=True)
    assert not disk.images
    assert by_tier(h.ask("enter", prompt(100), ONE, owner="a")) == {"device": 96}
    assert len(disk.images) == 6
    assert all(owners == {"a"} for owners in disk.owners.values())


def test_the_placement_of_a_chain_and_its_two_times() -> None:
    disk = FakeTier(read_bytes_per_s=256 * 100)
    h = Harness(tiers=[disk])
    names = h.ask("a", prompt(96), ONE).outputs[-1].block_hashes
    evict_all(h)
    placement = h.engine.place((*names, b"unknown", b"too"))
    assert placement.num_by_run == [("disk", 6), ("missing", 2)]
    assert placement.compute_s is not None
    assert placement.load_s is not None
    assert placement.compute_s > 0
    assert h.engine.place(names).load_s == 0.005 + 0.06
    assert h.engine.place(()).num_by_run == []
