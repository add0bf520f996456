"""Pulls as jobs of the service: each in its own thread, watched through snapshots, one per model."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import UserError
from ..paths import Paths
from .installed import InstalledModel
from .pull import plan_pull, pull
from .reports import IsCancelled, OnProgress, PullCancelled, PullProgress, Stage

JobState = Literal["running", "done", "failed", "cancelled"]
Pull = Callable[[Paths, str, OnProgress, IsCancelled, str | None], InstalledModel]

_RATE_WINDOW_S = 3.0
_MAX_ENDED_JOBS = 50
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobSnapshot:
    """One moment of a job; `as_json` is what the socket carries."""

    id: str
    name: str
    stage: Stage
    done_bytes: int
    total_bytes: int
    rate_bytes_s: float
    state: JobState
    error: str | None
    message: str
    kind: str = "pull"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "stage": self.stage,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "rate_bytes_s": self.rate_bytes_s,
            "state": self.state,
            "error": self.error,
            "message": self.message,
        }


class Job:
    """One pull in its thread. Every method may be called from any thread."""

    def __init__(self, name: str):
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._marks: deque[tuple[float, int]] = deque()
        self._now = JobSnapshot(secrets.token_hex(6), name, "resolve", 0, 0, 0.0, "running", None, "")

    @property
    def id(self) -> str:
        return self._now.id

    @property
    def name(self) -> str:
        return self._now.name

    def snapshot(self) -> JobSnapshot:
        with self._lock:
            return self._now

    def cancel(self) -> None:
        """Ask the pull to stop; it does so within a chunk. Without effect on one that has ended."""
        self._cancelled.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when it has not come by then."""
        return self._ended.wait(timeout_s)

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def note(self, progress: PullProgress, now_s: float) -> None:
        """Take in one report of the pull; `now_s` is a monotonic time."""
        with self._lock:
            if progress.stage != self._now.stage or (self._marks and progress.done_bytes < self._marks[-1][1]):
                self._marks.clear()
            self._marks.append((now_s, progress.done_bytes))
            while now_s - self._marks[0][0] > _RATE_WINDOW_S and len(self._marks) > 2:
                self._marks.popleft()
            self._now = replace(
                self._now,
                stage=progress.stage,
                done_bytes=progress.done_bytes,
                total_bytes=progress.total_bytes,
                rate_bytes_s=self._rate(),
                message=progress.message or self._now.message,
            )

    def end(self, state: JobState, error: str | None = None) -> None:
        with self._lock:
            self._now = replace(self._now, state=state, error=error, rate_bytes_s=0.0)
        self._ended.set()

    def _rate(self) -> float:
        (start_s, start_bytes), (end_s, end_bytes) = self._marks[0], self._marks[-1]
        return (end_bytes - start_bytes) / (end_s - start_s) if end_s > start_s else 0.0


class JobRunner:
    """Starts pulls and remembers them. `on_change` is told of every new state and progress, on the job's thread."""

    def __init__(
        self, paths: Paths, on_change: Callable[[JobSnapshot], None] = lambda snapshot: None, run: Pull = pull
    ):
        self._paths = paths
        self._on_change = on_change
        self._run = run
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name_or_spec: str, name: str | None = None) -> Job:
        """Begin a pull, or return the one that runs for the same model.

        Raises:
            UserError: there is no such model.
        """
        target = plan_pull(name_or_spec, name).name
        with self._lock:
            for job in self._jobs.values():
                if job.name == target and job.snapshot().state == "running":
                    return job
            job = Job(target)
            self._jobs[job.id] = job
            self._forget_old()
            thread = threading.Thread(
                target=self._work, args=(job, name_or_spec, name), name=f"pull-{target}", daemon=True
            )
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        self._on_change(job.snapshot())
        thread.start()
        return job

    def list_jobs(self) -> list[JobSnapshot]:
        """Running and ended jobs, oldest first."""
        with self._lock:
            return [job.snapshot() for job in self._jobs.values()]

    def get(self, job_id: str) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def cancel(self, job_id: str) -> bool:
        """Ask a job to stop; False when there is none of that id."""
        job = self.get(job_id)
        if job is None:
            return False
        job.cancel()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop every job and wait for the threads; what was downloaded is kept."""
        with self._lock:
            jobs, threads = list(self._jobs.values()), list(self._threads)
        for job in jobs:
            job.cancel()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, job: Job, name_or_spec: str, name: str | None) -> None:
        def on_progress(progress: PullProgress) -> None:
            job.note(progress, time.monotonic())
            self._on_change(job.snapshot())

        try:
            self._run(self._paths, name_or_spec, on_progress, job.is_cancelled, name)
            job.end("done")
        except PullCancelled as error:
            job.end("cancelled", str(error))
        except UserError as error:
            job.end("failed", str(error))
        except Exception as error:  # a bug of ours must end the job too, and be found in the log
            _logger.exception("pull of %s failed", job.name)
            job.end("failed", f"Internal error: {type(error).__name__}: {error}. Details are in the log file.")
        self._on_change(job.snapshot())

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.snapshot().state != "running"]
        for job in ended[:-_MAX_ENDED_JOBS]:
            del self._jobs[job.id]
