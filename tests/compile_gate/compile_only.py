"""Launches that compile and do not run: no GPU, no driver.

Inside `compile_only` the engine's own code runs on tensors in the CPU's memory, and each of its launches compiles its
kernel for the chosen card, with the signature, alignment and options of that launch. What kernels would have written
stays as it was. It reaches into private parts of triton (3.9.0), and cannot share a process with the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .cards import Card


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel in one form, or why there is none."""

    name: str
    constants: dict[str, Any]
    result: CompiledKernel | Exception


@dataclass(slots=True)
class Launches:
    compiled: list[Compiled] = field(default_factory=list)
    hashes: set[str] = field(default_factory=set)


class _NoDriver:
    """Stands for the driver of a card that is not there."""

    def __init__(self, card: Card) -> None:
        self._target = card.target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compile_only(card: Card) -> Iterator[Launches]:
    """Raises AssertionError in a process that interprets."""
    assert not knobs.runtime.interpret, "TRITON_INTERPRET is set: compile in a process of its own"
    launches = Launches()
    driver, run = triton.runtime.driver, JITFunction.run
    active = driver._active

    def compile_launch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        self.device_caches.clear()  # its key is the device's number, not the card
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, arguments, strict=False)) | options)
        name = self.__name__
        assert all(int(size) >= 1 for size in grid), f"{name}: an empty grid {grid}"
        constants = {key: value for key, value in options.items() if isinstance(value, int | bool)}
        try:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:
            launches.compiled.append(Compiled(name, constants, error))
            return None
        if kernel.hash not in launches.hashes:
            launches.hashes.add(kernel.hash)
            launches.compiled.append(Compiled(name, constants, kernel))
        return kernel

    driver.set_active(_NoDriver(card))
    JITFunction.run = compile_launch
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = active
