"""Which model was used last, for the next start."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class LastModel:
    """A file with one name in it. Losing it costs a person one choice, so no error of the disk matters."""

    def __init__(self, file: Path):
        self._file = file

    def read(self) -> str:
        """Empty when nothing is known."""
        try:
            return self._file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def write(self, name: str) -> None:
        try:
            self._file.write_text(name + "\n", "utf-8")
        except OSError as error:
            log.warning("cannot remember the model: %s", error)
