"""The person's own editor for a long message."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path


def editor_command() -> list[str]:
    """$VISUAL, else $EDITOR, else vi."""
    return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")


def edit(text: str) -> str:
    """Open `text` in the editor and return what was saved. The terminal must be free (`App.suspend`).

    Raises:
        OSError: the editor cannot be started, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="chatkv-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, "utf-8")
        command = editor_command()
        done = subprocess.run([*command, str(file)], check=False)
        if done.returncode:
            raise OSError(f"{command[0]} ended with status {done.returncode}")
        return file.read_text("utf-8").rstrip("\n")
