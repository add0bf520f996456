"""SwiGLU and GeGLU against their specifications in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chatkv.kernels import reference
from chatkv.kernels.triton.activation import gelu_mul, silu_mul
from tests.kernels.triton.numbers import COMPUTE_DTYPES, assert_near, random

GATES = [(silu_mul, reference.silu_mul), (gelu_mul, reference.gelu_mul)]
WIDTHS = [1, 24, 300, 1024, 1536]
Gate = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize(("gate", "specification"), GATES)
def test_every_width(gate: Gate, specification: Gate, dtype: torch.dtype, width: int) -> None:
    gate_up = random(3, 2 * width, dtype=dtype) * 3
    out = gate(gate_up)
    assert out.dtype == dtype
    assert_near(out, specification(gate_up.double()), dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 17])
@pytest.mark.parametrize(("gate", "specification"), GATES)
def test_every_row_count(gate: Gate, specification: Gate, num_rows: int) -> None:
    gate_up = random(num_rows, 48, dtype=torch.bfloat16)
    out = gate(gate_up)
    assert out.shape == (num_rows, 24)
    if num_rows:
        assert_near(out, specification(gate_up.double()), torch.bfloat16)


@pytest.mark.parametrize(("gate", "specification"), GATES)
def test_large_gates_neither_overflow_nor_vanish(gate: Gate, specification: Gate) -> None:
    gates = torch.tensor([[-3e38, -1e4, -120.0, -20.0, 0.0, 20.0, 120.0, 1e4, 3e38]])
    gate_up = torch.cat((gates, torch.full_like(gates, 0.5)), dim=1).bfloat16()
    out = gate(gate_up)
    assert out.isfinite().all()
    expected = specification(gate_up.double())
    assert ((out.double() - expected).abs() <= 0.01 * expected.abs() + 1e-6).all()


def test_the_reference_of_gelu_is_torchs() -> None:
    gate_up = random(4, 64) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(reference.gelu_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("gate", "specification"), GATES)
def test_a_row_that_is_not_finite_spoils_itself_only(gate: Gate, specification: Gate, half: int) -> None:
    gate_up = random(3, 48, dtype=torch.float16)
    good = gate(gate_up)
    gate_up[1, 24 * half + 7] = float("nan")
    out = gate(gate_up)
    assert out[1, 7].isnan()
    out[1, 7] = good[1, 7]
    assert torch.equal(out, good)
