"""Which copy goes first, and that no clock can turn the order over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tier_blocks import record

from chatkv.engine.tiers.copy_set import CopySet
from chatkv.engine.tiers.score import HALF_LIFE_S, NUM_GONE_KEPT, HitClock, decayed_hits, rank
from chatkv.engine.tiers.tier import CopyState, TierCopy

DAY_S = 24 * 3600.0


class Clock:
    def __init__(self, now_s: float = 1000 * DAY_S) -> None:
        self.wall_s = now_s
        self.up_s = 0.0

    def hit_clock(self) -> HitClock:
        return HitClock(lambda: self.wall_s, lambda: self.up_s)

    def go(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds


def stored(copies: CopySet, position: int = 0, number: int = 0, parent: TierCopy | None = None) -> TierCopy:
    copy = copies.add(record(position, number, parent.record if parent else None), parent)
    copies.set_stored([copy])
    return copy


def drain(copies: CopySet) -> list[TierCopy]:
    order: list[TierCopy] = []
    while (victim := copies.leaves.pop()) is not None:
        copies.drop([victim])
        order.append(victim)
    return order


number = st.floats(0.01, 1000)


@given(number, number, st.floats(0, 30), st.floats(0, 30), st.integers(0, 4000), st.integers(0, 4000), st.floats(0, 90))
def test_rank_orders_as_the_scores_do_at_any_time(
    hits_a: float, hits_b: float, day_a: float, day_b: float, position_a: int, position_b: int, days_later: float
) -> None:
    def score(hits: float, day: float, position: int) -> float:
        now_s = (30 + days_later) * DAY_S
        return decayed_hits(hits, day * DAY_S, now_s) * (1 + position / 256) / 4096

    a, b = score(hits_a, day_a, position_a), score(hits_b, day_b, position_b)
    rank_a = rank(hits_a, day_a * DAY_S, position_a, 4096)
    rank_b = rank(hits_b, day_b * DAY_S, position_b, 4096)
    if a > b * 1.0001:
        assert rank_a > rank_b
    elif b > a * 1.0001:
        assert rank_b > rank_a


def test_the_least_recently_used_goes_first_among_equals() -> None:
    clock = Clock()
    copies = CopySet(4096, clock.hit_clock())
    made = []
    for i in range(4):
        made.append(stored(copies, number=i))
        clock.go(DAY_S)
    copies.touch([made[0]])
    assert drain(copies) == [made[1], made[2], made[3], made[0]]


def test_what_takes_longer_to_compute_stays_longer() -> None:
    copies = CopySet(4096, Clock().hit_clock())
    head = stored(copies)
    deep = head
    for position in range(1, 300):
        deep = stored(copies, position, parent=deep)
    shallow = stored(copies, 1, number=2, parent=head)
    assert drain(copies)[:2] == [shallow, deep]


def test_only_leaves_go_and_a_shared_head_goes_last() -> None:
    copies = CopySet(4096, Clock().hit_clock())
    head = stored(copies)
    left, right = stored(copies, 1, 1, head), stored(copies, 1, 2, head)
    copies.touch([left, right] * 50)
    assert drain(copies)[-1] is head


def test_neither_pinned_nor_read_copies_go_until_they_are_free_again() -> None:
    copies = CopySet(4096, Clock().hit_clock())
    pinned, read = stored(copies, number=1), stored(copies, number=2)
    copies.pin([pinned], True)
    copies.pin([pinned], True)
    copies.begin_read([read])
    assert drain(copies) == []
    copies.end_read([read])
    copies.pin([pinned], False)
    assert drain(copies) == [read]
    copies.pin([pinned], False)
    assert drain(copies) == [pinned]


def test_a_clock_set_back_does_not_make_today_older_than_last_week() -> None:
    clock = Clock()
    copies = CopySet(4096, clock.hit_clock())
    old = stored(copies, number=1)
    clock.go(7 * DAY_S)
    clock.wall_s -= 365 * DAY_S
    new = stored(copies, number=2)
    assert new.hit_at_s > old.hit_at_s
    assert drain(copies) == [old, new]


def test_a_clock_behind_the_stored_hits_goes_on_from_them() -> None:
    clock = Clock(1000 * DAY_S)
    copies = CopySet(4096, clock.hit_clock())
    known = TierCopy(record(0, 1), None, 0, CopyState.STORED, hits=1.0, hit_at_s=2000 * DAY_S)
    copies.adopt([known])
    clock.go(HALF_LIFE_S)
    new = stored(copies, number=2)
    assert new.hit_at_s == 2000 * DAY_S + HALF_LIFE_S
    assert drain(copies) == [known, new]


def test_dropping_a_copy_drops_all_below_it_and_nothing_else() -> None:
    copies = CopySet(4096, Clock().hit_clock())
    head = stored(copies)
    middle = stored(copies, 1, 0, head)
    below = [stored(copies, 2, 1, middle), stored(copies, 2, 2, middle)]
    beside = stored(copies, 1, 3, head)
    dropped = copies.drop([middle])
    assert set(dropped) == {middle, *below}
    assert dropped[-1] is middle
    assert head.num_children == 1
    assert copies.stored() == [head, beside]
    assert copies.num_stored == 2
    assert copies.drop([middle]) == []


def test_what_is_gone_does_not_pile_up_while_nothing_is_evicted() -> None:
    copies = CopySet(4096, Clock().hit_clock())
    kept = [stored(copies, 0, number) for number in range(10)]
    for number in range(3 * NUM_GONE_KEPT):
        copies.drop([stored(copies, 0, 100 + number)])
    assert len(copies.leaves) <= NUM_GONE_KEPT + 12
    assert drain(copies) == kept
