"""The `chatkv` command."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """What the installed script calls. The rest is imported here, so that Ctrl-C leaves no trace then either."""
    try:
        from .command import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
