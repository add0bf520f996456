"""`python -m tests.gpu_dry_run`: the GPU check from end to end without a GPU, in the interpreter and with tiny sizes.

Whether kernels are right is checked as on a card; how fast they are means nothing. Takes the options of the check.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Chosen when kernels are first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")


def dry_run(arguments: Sequence[str]) -> int:
    import torch

    from chatkv.app.gpu_check.command import parsed, run
    from chatkv.app.gpu_check.sizes import DRY
    from tests.kernels.triton import interpreter

    interpreter.install()
    return run(parsed(arguments), torch.device("cpu"), DRY)


if __name__ == "__main__":
    sys.exit(dry_run(sys.argv[1:]))
