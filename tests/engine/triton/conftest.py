"""The GPU's kernels in triton's interpreter, on CPU tensors."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kernels.triton import interpreter

interpreter.install()
sys.path.insert(0, str(Path(__file__).parent))
