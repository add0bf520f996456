from __future__ import annotations

import threading
from pathlib import Path

import pytest

from chatkv.app.errors import UserError
from chatkv.app.hub.installed import InstalledModel, get_installed
from chatkv.app.hub.jobs import Job, JobRunner, JobSnapshot
from chatkv.app.hub.reports import IsCancelled, OnProgress, PullCancelled, PullProgress
from chatkv.app.paths import Paths
from tests.app.hub.makers import PullLog

WAIT_S = 20


def test_a_job_installs_a_model_and_says_so(log: PullLog, tiny_gguf: Path) -> None:
    seen: list[JobSnapshot] = []
    runner = JobRunner(log.paths, seen.append)
    job = runner.start(str(tiny_gguf))
    assert job.wait(WAIT_S)
    runner.close()
    assert get_installed(log.paths, "tiny").is_usable
    assert seen[0].state == "running"
    assert seen[-1] == runner.list_jobs()[0]
    assert seen[-1].as_json() == {
        "id": job.id,
        "kind": "pull",
        "name": "tiny",
        "stage": "done",
        "done_bytes": seen[-1].total_bytes,
        "total_bytes": seen[-1].total_bytes,
        "rate_bytes_s": 0.0,
        "state": "done",
        "error": None,
        "message": "tiny is installed",
    }


class HeldPull:
    """A pull that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.num_runs = 0

    def __call__(
        self, paths: Paths, what: str, on_progress: OnProgress, is_cancelled: IsCancelled, name: str | None
    ) -> InstalledModel:
        self.num_runs += 1
        on_progress(PullProgress("download", 5, 10, "file:x"))
        self.begun.set()
        tick = threading.Event()
        while not is_cancelled():
            tick.wait(0.01)
        raise PullCancelled


def test_a_model_has_one_job_at_a_time(paths: Paths) -> None:
    held = HeldPull()
    runner = JobRunner(paths, run=held)
    first = runner.start("smollm2-135m")
    assert held.begun.wait(WAIT_S)
    assert runner.start("smollm2-135m") is first
    assert runner.cancel(first.id)
    assert first.wait(WAIT_S)
    assert first.snapshot().state == "cancelled"
    second = runner.start("smollm2-135m")
    runner.close()
    assert second is not first
    assert second.snapshot().state == "cancelled"
    assert held.num_runs == 2
    assert not runner.cancel("no such id")


def test_an_unknown_model_is_refused_before_a_job_exists(paths: Paths) -> None:
    runner = JobRunner(paths)
    with pytest.raises(UserError, match="Did you mean"):
        runner.start("smollm2")
    assert runner.list_jobs() == []


@pytest.mark.parametrize(
    ("error", "says"), [(UserError("no room", "free some"), "no room\nfree some"), (ZeroDivisionError("oops"), "log")]
)
def test_a_failed_job_carries_a_message(paths: Paths, error: Exception, says: str) -> None:
    def fail(*_: object) -> InstalledModel:
        raise error

    runner = JobRunner(paths, run=fail)
    job = runner.start("smollm2-135m")
    assert job.wait(WAIT_S)
    assert job.snapshot().state == "failed"
    assert says in (job.snapshot().error or "")


def test_the_rate_is_measured_over_the_last_seconds() -> None:
    job = Job("x")
    for second in range(11):
        job.note(PullProgress("download", second * (100 if second <= 5 else 300), 10_000, "file:x"), float(second))
    assert job.snapshot().rate_bytes_s == pytest.approx(300.0)
    job.note(PullProgress("verify", 0, 10_000, "file:x"), 11.0)
    assert job.snapshot().rate_bytes_s == 0.0
