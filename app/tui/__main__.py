"""`python -m chatkv.app.tui`: the terminal app without the command line around it."""

from __future__ import annotations

import sys

from chatkv.app.paths import Paths
from chatkv.app.settings import load_settings

from .run import run

if __name__ == "__main__":
    paths = Paths.from_env()
    settings = load_settings(paths)
    sys.exit(run(paths, settings))
