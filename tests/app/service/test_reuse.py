"""What requests found: where a day's prompt tokens came from, and what had to be computed again."""

from __future__ import annotations

from collections import Counter

import pytest

from chatkv.app.service.reuse import COMPUTED, RequestLog, num_recomputed
from chatkv.engine.request import RequestOutput

from .fake_engine import FakeModels


def output(num_prompt_tokens: int, **cached_by_tier: int) -> RequestOutput:
    num_cached = sum(cached_by_tier.values())
    return RequestOutput(
        "r", 0, num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached, cached_by_tier=cached_by_tier
    )


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def requests(counts: Counter[str]) -> RequestLog:
    def count(tier: str, num_tokens: int) -> None:
        counts[tier] += num_tokens

    return RequestLog(count)


def test_each_prompt_token_is_counted_once_where_it_came_from(requests: RequestLog, counts: Counter[str]) -> None:
    """A chat is warmed from the disk when it is opened, so its turn finds it all on the device."""
    model = FakeModels().load_default()
    requests.note_warm(output(2704, device=16, disk=2688), "a")
    assert not counts, "nobody has asked anything yet"
    requests.note(model, [], output(2733, device=2720), "a")
    assert counts == {"device": 32, "disk": 2688, COMPUTED: 13}
    requests.note(model, [], output(2800, device=2752), "a")
    assert counts == {"device": 32 + 2752, "disk": 2688, COMPUTED: 13 + 48}
    requests.note_warm(output(64, disk=64), "b")
    requests.note(model, [], output(64, device=48), "b")
    assert counts.total() == 2733 + 2800 + 64


def test_what_is_new_is_not_computed_again() -> None:
    assert num_recomputed(output(100), 0) == 0
    assert num_recomputed(output(2733, device=2720), 2725) == 0
    assert num_recomputed(output(2733, device=2704), 2725) == 0, "the last sampled token leaves its block open"
    assert num_recomputed(output(2733, disk=864), 2725) == 2720 - 864
    assert num_recomputed(output(1000), 2725) == 992, "old turns were left out, and the rest moved"
