"""Angles of rotary embedding: float32 products, rounded once, the same whenever the table grew."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from chatkv.kernels.cpu.native.angles import FIRST_CAPACITY, AngleTable

FREQUENCIES = np.array([1.0, 0.1, 0.0033], np.float32)


def rows(table: AngleTable, positions: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cos, sin = (np.empty((len(positions), len(FREQUENCIES)), np.float32) for _ in range(2))
    table.look_up(np.array(positions), max(positions) + 1, cos, sin)
    return cos, sin


def test_each_number_is_rounded_once() -> None:
    cos, sin = rows(AngleTable(FREQUENCIES, 1.5), [0, 7, 1000])
    for row, position in enumerate((0, 7, 1000)):
        for column, frequency in enumerate(FREQUENCIES):
            angle = float(np.float32(position) * frequency)
            assert cos[row, column] == np.float32(math.cos(angle) * 1.5)
            assert sin[row, column] == np.float32(math.sin(angle) * 1.5)


def test_a_table_that_grew_step_by_step_is_the_one_made_at_once() -> None:
    grown = AngleTable(FREQUENCIES, 1.0)
    positions = [3, FIRST_CAPACITY - 1, FIRST_CAPACITY, 3 * FIRST_CAPACITY]
    for position in positions:
        rows(grown, [position])
    for found, expected in zip(rows(grown, positions), rows(AngleTable(FREQUENCIES, 1.0), positions), strict=True):
        assert np.array_equal(found, expected)
