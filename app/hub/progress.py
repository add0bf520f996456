"""A pull on the terminal: bars, or plain lines where output is not one (a log, a pipe)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.text import Text

from .reports import OnProgress, PullProgress, Stage, human_bytes

_WORDS: dict[Stage, str] = {
    "resolve": "Looking up",
    "download": "Downloading",
    "verify": "Checking",
    "import": "Importing",
    "done": "Installed",
}
_PLAIN_STEP = 0.1
"""Plain output has a line for every tenth."""


@contextmanager
def show_progress(console: Console) -> Iterator[OnProgress]:
    """A callback that draws each report on `console` (the one for messages, standard error)."""
    if not console.is_terminal:
        yield _PlainLines(console)
        return
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)


class _Bars:
    """One bar for each stage that has begun; messages scroll above them."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.stage_to_task: dict[tuple[Stage, str], TaskID] = {}
        self.message = ""

    def __call__(self, report: PullProgress) -> None:
        if report.message and report.message != self.message:
            self.message = report.message
            self.progress.console.print(Text(report.message))
        if report.stage in ("resolve", "done"):
            return
        key = (report.stage, report.source)
        total = report.total_bytes or None
        if key not in self.stage_to_task:
            for (stage, _), task in list(self.stage_to_task.items()):
                if stage == report.stage:  # the same stage from a source that failed
                    self.progress.update(task, visible=False)
            self.stage_to_task[key] = self.progress.add_task(_WORDS[report.stage], total=total)
        self.progress.update(self.stage_to_task[key], completed=report.done_bytes, total=total)


class _PlainLines:
    """A line when a stage begins, for every tenth of it, and for each message."""

    def __init__(self, console: Console):
        self.console = console
        self.last: tuple[Stage, str, int] | None = None

    def __call__(self, report: PullProgress) -> None:
        if report.message:
            self._print(report.message)
        if report.stage in ("resolve", "done") or not report.total_bytes:
            return
        tenth = int(report.done_bytes / report.total_bytes / _PLAIN_STEP)
        now = (report.stage, report.source, tenth)
        if now != self.last:
            self.last = now
            done, total = human_bytes(report.done_bytes), human_bytes(report.total_bytes)
            self._print(f"{_WORDS[report.stage]} {done} of {total} ({10 * tenth} %)")

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
