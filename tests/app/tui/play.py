"""`python play.py DRAFTS_DIR`: the app over a scripted service, for tests in a pseudo-terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_service import FakeService

from chatkv.app.paths import Paths
from chatkv.app.settings import Settings
from chatkv.app.tui.run import run

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    service = FakeService()
    service.add_chat("Porto", ("user", "where to?"), ("assistant", "to the \x1b]0;pwn\x07river"), is_pinned=True)
    sys.exit(run(Paths(*[folder] * 5), Settings(), service))
