"""Getting text to the clipboard, and saying honestly whether it arrived."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Copied:
    is_certain: bool
    how: str


def copy(text: str, write_osc52: Callable[[str], None], fallback_file: Path | None) -> Copied:
    """Try the tools that answer, then OSC 52, which never does; in that case leave the text in a file as well."""
    for name, command in _tools():
        if _pipe(command, text):
            return Copied(True, f"with {name}")
    write_osc52(text)
    if fallback_file is not None and _write(fallback_file, text):
        return Copied(False, f"sent to the terminal, which does not confirm; also in {fallback_file}")
    return Copied(False, "sent to the terminal, which does not confirm")


def _tools() -> list[tuple[str, list[str]]]:
    tools: list[tuple[str, list[str]]] = []
    if os.environ.get("WAYLAND_DISPLAY"):
        tools.append(("wl-copy", ["wl-copy"]))
    if os.environ.get("DISPLAY"):
        tools += [
            ("xclip", ["xclip", "-selection", "clipboard"]),
            ("xsel", ["xsel", "--clipboard", "--input"]),
        ]
    if os.environ.get("TMUX"):
        tools.append(("tmux (paste with prefix ])", ["tmux", "load-buffer", "-w", "-"]))
    return [tool for tool in tools if shutil.which(tool[1][0])]


def _pipe(command: list[str], text: str) -> bool:
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _write(file: Path, text: str) -> bool:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
    except OSError:
        return False
    return True
