"""Worker threads: asleep when nothing is to be done, there again when something is."""

from __future__ import annotations

import time

import pytest
import torch

from chatkv.kernels.cpu.native.abi import Activations, Op, OpKind, Register, Step
from chatkv.kernels.cpu.native.library import NativeThreads, native_library

NUM_ROWS, NUM_COLUMNS = 64, 96
DEADLINE_S = 20.0


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_workers_fall_asleep_and_come_back(num_threads: int) -> None:
    rows = torch.randn(NUM_ROWS, NUM_COLUMNS)
    quanta = torch.empty(NUM_ROWS, NUM_COLUMNS, dtype=torch.int8)
    scales, offsets = torch.empty(2, NUM_ROWS, NUM_COLUMNS // 32).unbind()
    sums = torch.empty(NUM_ROWS, NUM_COLUMNS // 32, dtype=torch.int32)
    op = (Op * 1)(Op(kind=OpKind.QUANTISE, num_columns=NUM_COLUMNS))
    step = Step(ops=op, num_ops=1, num_rows=NUM_ROWS)
    step.registers[0] = Register(rows.data_ptr(), NUM_COLUMNS)
    step.activations = Activations(quanta.data_ptr(), scales.data_ptr(), sums.data_ptr(), offsets.data_ptr())
    threads = NativeThreads(native_library(), num_threads)
    try:
        threads.run(step)
        expected = quanta.clone()
        for _ in range(3):
            deadline = time.monotonic() + DEADLINE_S
            while threads.num_awake_workers:
                assert time.monotonic() < deadline, "a worker does not fall asleep"
            quanta.zero_()
            threads.run(step)
            assert torch.equal(quanta, expected)
    finally:
        threads.close()
