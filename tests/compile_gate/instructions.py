"""Counts of instructions in a kernel's hot loop, from the compiled binary. Counts are not timings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from triton.compiler import CompiledKernel

_LABEL = re.compile(r"\s*(LBB\d+):\s*$")
_BRANCH = re.compile(r"\bBRA\S*\s.*?(LBB\d+|0x[0-9a-f]+);")
_OPCODE = re.compile(r"\t(?:@!?U?PT?\d* )?([A-Z][A-Z0-9_.]*)")
_ACCESS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Other loads take 4."""
INSTRUCTION_BYTES = 16


class LoopCounts(NamedTuple):
    """Of one thread in one turn of the loop."""

    num_instructions: int
    num_matrix: int
    """Tensor core instructions."""
    num_conversions: int
    """Between integers and floats, or among floats."""
    num_barriers: int
    mean_load_bytes: float
    """Of a load from global memory, copies to shared memory included; 0 where there is none."""


def hot_loop(kernel: CompiledKernel) -> LoopCounts:
    """Raises AssertionError when there is no loop."""
    counts = _opcodes(_longest_loop(kernel.asm["sass"].splitlines()))

    def total(pattern: str) -> int:
        return sum(number for opcode, number in counts.items() if re.match(pattern, opcode))

    loads = {opcode: number for opcode, number in counts.items() if re.match(r"LDG\.|LDGSTS", opcode)}
    loaded = sum(_access_bytes(opcode) * number for opcode, number in loads.items())
    return LoopCounts(
        num_instructions=sum(counts.values()),
        num_matrix=total(r"[HIQ]MMA|[HIQ]GMMA|WGMMA|UTC"),
        num_conversions=total(r"I2F|F2F|F2I|I2I"),
        num_barriers=total(r"BAR"),
        mean_load_bytes=loaded / sum(loads.values()) if loads else 0.0,
    )


def _longest_loop(lines: Sequence[str]) -> list[str]:
    """The longest stretch that a branch goes back over. Branches name labels or, uniform ones of sm_120, addresses."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif "\t" in line:
            instructions.append(line)
    loop = range(0)
    for index, line in enumerate(instructions):
        if branch := _BRANCH.search(line):
            name = branch.group(1)
            start = labels[name] if name in labels else int(name, 16) // INSTRUCTION_BYTES
            if index + 1 - start > len(loop):
                loop = range(start, index + 1)
    assert loop, "the kernel has no loop"
    return instructions[loop.start : loop.stop]


def _opcodes(lines: Sequence[str]) -> Counter[str]:
    return Counter(match.group(1) for line in lines if (match := _OPCODE.search(line)))


def _access_bytes(opcode: str) -> int:
    return next((_ACCESS_BYTES[part] for part in opcode.split(".") if part in _ACCESS_BYTES), 4)
