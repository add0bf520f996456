"""`python app/gpu_check` in a checkout, installed or not, and `python -m chatkv.app gpu-check`.

A checkout has no folder `chatkv`: one of links to the four roots is made under `build`, which git ignores. So the
check runs on a machine without network and with another torch than the one that an installation would pin.
"""

from __future__ import annotations

import sys
from pathlib import Path


def link_checkout() -> None:
    """Makes `chatkv.app` and its siblings importable, before any installed version of them."""
    root = Path(__file__).resolve().parents[2]
    links = root / "build" / "gpu-check" / "chatkv"
    links.mkdir(parents=True, exist_ok=True)
    for name in ("app", "engine", "kernels", "assets"):
        link = links / name
        if not link.is_symlink():
            link.symlink_to(root / name, target_is_directory=True)
    sys.path.insert(0, str(links.parent))


if __name__ == "__main__":
    if not __package__:
        link_checkout()
    from chatkv.app.gpu_check.command import main

    sys.exit(main(sys.argv[1:]))
