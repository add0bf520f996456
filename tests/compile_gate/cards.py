"""What kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from triton.backends.compiler import GPUTarget


class Card(NamedTuple):
    """One architecture."""

    target: GPUTarget
    shared_bytes: int
    """Shared memory that one program may have at most."""
    examples: str

    @property
    def is_amd(self) -> bool:
        return self.target.backend == "hip"

    @property
    def has_fp8(self) -> bool:
        """Its tensor cores multiply e4m3."""
        return not self.is_amd and self.target.arch >= 89


CARDS = {
    "sm_80": Card(GPUTarget("cuda", 80, 32), 163 << 10, "A100"),
    "sm_86": Card(GPUTarget("cuda", 86, 32), 99 << 10, "RTX 30"),
    "sm_89": Card(GPUTarget("cuda", 89, 32), 99 << 10, "RTX 40"),
    "sm_90": Card(GPUTarget("cuda", 90, 32), 227 << 10, "H100"),
    "sm_120": Card(GPUTarget("cuda", 120, 32), 99 << 10, "RTX 50"),
    "gfx1100": Card(GPUTarget("hip", "gfx1100", 32), 64 << 10, "RX 7900, as information"),
}
