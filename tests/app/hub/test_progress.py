from __future__ import annotations

import io

from rich.console import Console

from chatkv.app.hub.progress import show_progress
from chatkv.app.hub.reports import PullProgress

REPORTS = [
    PullProgress("resolve", 0, 1000, "hf:a/b/c"),
    PullProgress("download", 0, 1000, "hf:a/b/c", "from hf:a/b/c"),
    PullProgress("resolve", 0, 1000, "hf:a/b/c", "hf:a/b/c failed: [no] network"),
    *[PullProgress("download", done, 1000, "pypi:a==1") for done in range(0, 1001, 10)],
    PullProgress("import", 1000, 1000, "pypi:a==1"),
    PullProgress("done", 1000, 1000, "pypi:a==1", "a is installed"),
]


def shown(*, is_terminal: bool) -> str:
    out = io.StringIO()
    with show_progress(Console(file=out, force_terminal=is_terminal, width=80, height=24)) as on_progress:
        for report in REPORTS:
            on_progress(report)
    return out.getvalue()


def test_output_that_is_no_terminal_gets_plain_lines_and_few_of_them() -> None:
    text = shown(is_terminal=False)
    assert "\x1b" not in text
    assert "hf:a/b/c failed: [no] network\n" in text
    assert "Downloading 500 B of 1.0 kB (50 %)" in text
    assert text.endswith("a is installed\n")
    assert len(text.splitlines()) < 20


def test_a_terminal_gets_a_bar_and_the_messages() -> None:
    text = shown(is_terminal=True)
    assert "Downloading" in text
    assert "hf:a/b/c failed: [no] network" in text
    assert "a is installed" in text
