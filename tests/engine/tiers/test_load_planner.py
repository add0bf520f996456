from __future__ import annotations

import pytest
from fake_tier import FakeTier
from harness import Harness, prompt
from test_loads import ONE, by_tier, evict_all

from chatkv.engine.tiers.load_planner import PrefillCost


def test_the_cost_of_reading_is_a_line_over_the_position() -> None:
    cost = PrefillCost()
    assert cost.seconds(0, 100) == 0.0
    for start in range(0, 4000, 64):
        cost.record(64, start + 31.5, 64 * (0.003 + 1e-6 * (start + 31.5)))
    a, b = cost.line()
    assert a == pytest.approx(0.003, rel=1e-3)
    assert b == pytest.approx(1e-6, rel=1e-3)
    assert cost.seconds(0, 4000) == pytest.approx(4000 * 0.003 + 1e-6 * 4000 * 3999 / 2, rel=1e-3)
    assert cost.seconds(2000, 2016) == pytest.approx(16 * (0.003 + 1e-6 * 2007.5), rel=1e-3)


def test_the_line_follows_the_machine_and_never_says_less_than_nothing() -> None:
    cost = PrefillCost()
    for _ in range(300):
        cost.record(64, 100.0, 64 * 0.010)
    for _ in range(300):
        cost.record(64, 100.0, 64 * 0.002)
    assert cost.seconds(0, 1) == pytest.approx(0.002, rel=0.02)
    falling = PrefillCost()
    falling.record(64, 0.0, 64 * 0.010)
    falling.record(64, 4000.0, 64 * 0.001)
    assert falling.seconds(100_000, 100_016) > 0


@pytest.mark.parametrize(("read_bytes_per_s", "is_loaded"), [(0.0, True), (1e9, True), (100.0, False)])
def test_d6_reading_is_chosen_when_it_is_faster_or_unknown(read_bytes_per_s: float, is_loaded: bool) -> None:
    disk = FakeTier(read_bytes_per_s=read_bytes_per_s)
    h = Harness(tiers=[disk])
    h.ask("a", prompt(96), ONE)
    evict_all(h)
    answer = h.ask("b", prompt(100), ONE)
    load = answer.outputs[-1].load
    assert load is not None
    assert load.is_loaded is is_loaded
    assert load.num_tokens == 96
    assert load.num_loaded_tokens == (96 if is_loaded else 0)
    assert load.compute_s > 0
    assert by_tier(answer) == ({"disk": 96} if is_loaded else {})
    assert set(disk.num_written.values()) == {1}, "what was computed again is not stored again"


def test_constants_outlive_the_engine() -> None:
    h = Harness()
    h.ask("a", prompt(96), ONE)
    constants = h.engine.planner.constants
    assert PrefillCost(**constants).seconds(0, 100) == h.engine.planner.compute_s(0, 100) != 0
