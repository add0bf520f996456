"""What a compiled kernel needs of a card: told by the assembler, since the metadata do not hold it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import CompiledKernel


class Resources(NamedTuple):
    num_registers: int
    """A thread's."""
    spilled: int
    """Bytes, stores and loads together; on AMD registers."""
    shared_bytes: int
    num_warps: int
    binary_bytes: int


def resources_of(kernel: CompiledKernel) -> Resources:
    metadata = kernel.metadata
    registers, spilled = _of_amd(kernel) if metadata.target.backend == "hip" else _of_nvidia(kernel)
    return Resources(registers, spilled, metadata.shared, metadata.num_warps, len(kernel.kernel))


def _of_nvidia(kernel: CompiledKernel) -> tuple[int, int]:
    arch = kernel.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        options = ["-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(arch)}"]
        command = [get_ptxas(arch).path, *options, str(source), "-o", str(source.with_suffix(".o"))]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    text = told.stderr + told.stdout
    stores, loads = (int(_found(rf"(\d+) bytes spill {part}", text)) for part in ("stores", "loads"))
    return int(_found(r"Used (\d+) registers", text)), stores + loads


def _of_amd(kernel: CompiledKernel) -> tuple[int, int]:
    text = kernel.asm["amdgcn"]
    registers, *spilled = (
        int(_found(rf"\.{name}:\s*(\d+)", text)) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return registers, sum(spilled)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in what the assembler says:\n{text[-2000:]}"
    return match.group(1)
