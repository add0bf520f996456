"""What the commands print: stdout belongs to output, stderr to people."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from chatkv.app.tui.render.sanitize import sanitize

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_LENGTH = 3
"""The answer was cut by the token limit."""

JsonOption = Annotated[bool, typer.Option("--json", help="Everything, for scripts.")]


def is_terminal() -> bool:
    return sys.stdout.isatty()


def show(text: str) -> str:
    """`text` as it may reach this stdout: sanitised for a terminal, untouched in a pipe."""
    return sanitize(text) if is_terminal() else text


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def say(message: str) -> None:
    """A line for the person, never part of the output."""
    print(sanitize(message), file=sys.stderr, flush=True)


def confirm(question: str, *, default: bool) -> bool:
    """Ask the person at the terminal; Ctrl-C ends the command.

    Not inside an event loop, which takes Ctrl-C for itself. The signal acts by itself here, because an interrupt that
    comes just before Python begins to read is noticed only after the line.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        say(f"{question} {'[Y/n]' if default else '[y/N]'}")
        answer = sys.stdin.readline().strip().lower()
    finally:
        signal.signal(signal.SIGINT, before)
    return default if not answer else answer in ("y", "yes")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """A table for people; tab-separated lines without a header in a pipe."""
    rows = list(rows)
    if not is_terminal():
        for row in rows:
            print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row))
        return
    if not rows:
        say(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(sanitize(cell)) for cell in row))
    Console().print(table)


def human_age(seconds: float) -> str:
    """now, 5m, 3h, 2d"""
    for limit, size, unit in ((3600, 60, "m"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // size)}{unit}" if seconds >= 60 else "now"
    return f"{int(seconds // 86400)}d"
