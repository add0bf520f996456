"""Memory of a step: registers, activations and inputs, taken once and grown to the largest batch."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...program import Linear, Program, Register
from ...weights import GROUP_SIZE
from .abi import Step

MIN_ROWS = 16
MAX_SELECTED_ROWS = 32
"""Logits are wide: more rows are computed in turns."""

Number = TypeVar("Number", bound=np.generic)


class StepBuffers:
    """Points a `Step` at its memory."""

    def __init__(self, program: Program, step: Step) -> None:
        self._program = program
        self._step = step
        self._widest = max(op.weights[0].shape[1] for op in program.ops if isinstance(op, Linear))
        self._num_rows = 0
        self._kept: list[NDArray[np.generic]] = []
        self.logits = torch.empty(MAX_SELECTED_ROWS, program.vocab_size)
        self._point(Register.LOGITS, self.logits.numpy())
        self.selected = np.empty(MAX_SELECTED_ROWS, np.int32)
        self._selected_hidden = np.empty((MAX_SELECTED_ROWS, program.hidden_size), np.float32)
        self._point(Register.SELECTED, self._selected_hidden)
        step.selected = self.selected.ctypes.data
        self.ensure(MIN_ROWS)

    def ensure(self, num_rows: int) -> None:
        """Room for that many rows. What was there is lost when it grows."""
        if num_rows <= self._num_rows:
            return
        # In powers of two, so that slowly growing batches do not move memory each time.
        rows = self._num_rows = max(1 << (num_rows - 1).bit_length(), MIN_ROWS)
        program, step = self._program, self._step
        self._kept.clear()
        self.token_ids, self.slots = self._new((rows,), np.int32), self._new((rows,), np.int32)
        self.is_finite = self._new((rows,), np.bool_)
        angles = (rows, program.head_dim // 2)
        self.cos, self.sin = self._new(angles, np.float32), self._new(angles, np.float32)
        step.token_ids, step.slots = self.token_ids.ctypes.data, self.slots.ctypes.data
        step.is_finite = self.is_finite.ctypes.data
        step.cos, step.sin = self.cos.ctypes.data, self.sin.ctypes.data
        for register in (Register.HIDDEN, Register.HEADS, Register.ATTENDED, Register.GATE_UP):
            self._point(register, self._new((rows, program.width(register)), np.float32))
        groups = (rows, self._widest // GROUP_SIZE)
        activations = step.activations
        activations.quanta = self._new((rows, self._widest), np.int8).ctypes.data
        activations.low = self._new((rows, self._widest), np.int8).ctypes.data
        activations.scales = self._new(groups, np.float32).ctypes.data
        activations.sums = self._new(groups, np.int32).ctypes.data
        activations.offsets = self._new(groups, np.float32).ctypes.data

    def _new(self, shape: tuple[int, ...], dtype: type[Number]) -> NDArray[Number]:
        """Aligned to cache lines, as torch's memory is."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = torch.empty(num_bytes, dtype=torch.uint8).numpy().view(dtype).reshape(shape)
        self._kept.append(array)
        return array

    def _point(self, register: Register, rows: NDArray[np.float32]) -> None:
        self._step.registers[register].data = rows.ctypes.data
        self._step.registers[register].stride = rows.shape[1]
