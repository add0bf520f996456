"""Which architecture kernels are compiled for."""

from __future__ import annotations

import triton


def cuda_arch() -> int:
    """Such as 89; 0 in the interpreter, and for devices that are not CUDA's."""
    if triton.knobs.runtime.interpret:
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0
