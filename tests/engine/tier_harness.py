"""What tests of lower tiers share: how blocks come to lie below the device, and what a reply says of it."""

from __future__ import annotations

from fake_tier import FakeTier
from harness import Answer, Harness, prompt

from chatkv.engine.request import SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def evict_all(h: Harness) -> None:
    """The device is empty; lower tiers keep what they have."""
    blank = h.engine.kv.pool.allocate(h.engine.kv.pool.num_free)
    h.engine.kv.pool.free(blank)
    h.engine.check_integrity()


def by_tier(answer: Answer) -> dict[str, int]:
    return dict(answer.outputs[-1].cached_by_tier)


def only_on_disk() -> tuple[Harness, FakeTier]:
    """The six blocks of prompt(96) lie on disk and nowhere else."""
    disk = FakeTier()
    h = Harness(tiers=[disk])
    h.ask("old", prompt(96), ONE)
    evict_all(h)
    return h, disk
