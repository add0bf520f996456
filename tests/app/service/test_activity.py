"""When a service counts as unused."""

from __future__ import annotations

import pytest

from chatkv.app.service import activity
from chatkv.app.service.activity import Activity


def test_open_requests_and_work_keep_it_alive_and_monitors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(activity.time, "monotonic", lambda: now)
    used = Activity()
    with used.request("/chatkv/events"):
        now = 200.0
        assert used.idle_s(is_working=False) == 0.0
        now = 300.0
    now = 310.0
    assert used.idle_s(is_working=False) == 10.0
    with used.request("/metrics"), used.request("/health"):
        assert used.idle_s(is_working=False) == 10.0
    assert used.idle_s(is_working=True) == 0.0
    now = 315.0
    assert used.idle_s(is_working=False) == 5.0
