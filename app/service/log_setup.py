"""The service's log: a rotating file of its own, 0600, without prompts, answers or queries."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_LOG_BYTES = 2 * 2**20
NUM_OLD_LOGS = 2


class _PrivateHandler(RotatingFileHandler):
    def _open(self):  # type: ignore[no-untyped-def]
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="replace")


def set_up_logging(file: Path, is_foreground: bool) -> None:
    """Everything from INFO on; in the foreground also to stderr."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    form = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handlers: list[logging.Handler] = [_PrivateHandler(file, maxBytes=MAX_LOG_BYTES, backupCount=NUM_OLD_LOGS)]
    if is_foreground:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
    for noisy in ("uvicorn.error", "httpx", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def detach(file: Path) -> None:
    """Standard input from nowhere; what native libraries print on stdout and stderr goes beside the log."""
    with open(os.devnull, "rb") as nowhere:
        os.dup2(nowhere.fileno(), 0)
    noise = file.with_suffix(".stderr.log")
    descriptor = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
