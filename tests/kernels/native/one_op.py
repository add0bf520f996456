"""Steps of one operation, run on any variant, and what they leave behind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chatkv.kernels.cpu.native.abi import Activations, Format, Matrix, Op, OpFlags, OpKind, Register, Step
from chatkv.kernels.cpu.native.library import native_library
from chatkv.kernels.weights import TiledWeight

FORMATS = {"int4-affine": Format.INT4_AFFINE, "int4": Format.INT4, "int8": Format.INT8}
GROUP = 32
LOW_QUANTA = 254
GUARD = 64
"""Elements around a result that nothing may write to."""
GUARD_VALUE = 77


class QuantisedRows(NamedTuple):
    """number = quantum * scale; G = n / 32. Fine rows have a low plane."""

    quanta: Tensor
    """int8 [num_rows, n]"""
    scales: Tensor
    """float32 [num_rows, G]"""
    sums: Tensor
    """int32 [num_rows, G]"""
    offsets: Tensor
    """float32 [num_rows, G]"""
    low: Tensor | None = None
    """int8 [num_rows, n]"""

    def joined_quanta(self) -> Tensor:
        """float64 [num_rows, n], whole numbers"""
        return self.quanta.double() if self.low is None else LOW_QUANTA * self.quanta.double() + self.low

    def numbers(self) -> Tensor:
        """float64 [num_rows, n]"""
        return (self.joined_quanta().unflatten(1, (-1, GROUP)) * self.scales.double().unsqueeze(-1)).flatten(1)

    def rows(self, begin: int, end: int) -> QuantisedRows:
        return QuantisedRows(*(None if part is None else part[begin:end].contiguous() for part in self))


class Product(NamedTuple):
    """A matrix as `linear` takes it. `misalignment`: bytes by which its tiles' address misses a multiple of 64."""

    weight: TiledWeight
    bias: Tensor | None = None
    first_output: int = 0
    misalignment: int = 0


def other_variants() -> tuple[str, ...]:
    """Those that this machine runs besides scalar, which is the one they must equal."""
    return tuple(name for name in native_library().variants if name != "scalar")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit; one NaN is like another."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(*(torch.where(part.isnan(), 0, part).contiguous().view(torch.int32) for part in (a, b)))


def quantise(x: Tensor, variant: str = "scalar", num_threads: int = 1, *, is_fine: bool = False) -> QuantisedRows:
    """float32 [num_rows, n]"""
    return _quantised(OpKind.QUANTISE, x, x.shape[1], variant, num_threads, is_fine)


def norm_quantise(
    x: Tensor, weight: Tensor, eps: float, variant: str = "scalar", num_threads: int = 1, *, is_fine: bool = False
) -> QuantisedRows:
    return _quantised(OpKind.NORM_QUANTISE, x, x.shape[1], variant, num_threads, is_fine, weight, eps)


def silu_mul_quantise(
    gate_up: Tensor, variant: str = "scalar", num_threads: int = 1, *, is_fine: bool = False
) -> QuantisedRows:
    """float32 [num_rows, 2 n]"""
    return _quantised(OpKind.SILU_MUL_QUANTISE, gate_up, gate_up.shape[1] // 2, variant, num_threads, is_fine)


def embed(token_ids: Tensor, table: TiledWeight, variant: str = "scalar", num_threads: int = 1) -> Tensor:
    """int32 [num_rows] -> float32 [num_rows, n]"""
    memory: list[Tensor] = []
    target = torch.full((len(token_ids), table.shape[1] + GUARD), float(GUARD_VALUE))
    op = Op(matrices=_matrices([Product(table)], memory), kind=OpKind.EMBED, target=1, num_matrices=1)
    step = Step(num_rows=len(token_ids), token_ids=token_ids.data_ptr())
    step.registers[1] = _register(target)
    _run(step, op, variant, num_threads)
    assert bool((target[:, -GUARD:] == GUARD_VALUE).all())
    return target[:, :-GUARD]


def linear(
    rows: QuantisedRows,
    products: Sequence[Product],
    added_to: Tensor | None = None,
    variant: str = "scalar",
    num_threads: int = 1,
) -> Tensor:
    """float32 [num_rows, w], w where the last output ends. `added_to`: [num_rows, w], which stays as it is.

    Columns that no product writes hold GUARD_VALUE.
    """
    memory: list[Tensor] = []
    num_rows, num_columns = rows.quanta.shape
    width = max(product.first_output + product.weight.num_rows for product in products)
    target = torch.full((num_rows, GUARD + width + GUARD), float(GUARD_VALUE))
    if added_to is not None:
        target[:, GUARD:-GUARD] = added_to
    op = Op(
        matrices=_matrices(products, memory),
        kind=OpKind.LINEAR if added_to is None else OpKind.LINEAR_ADD,
        target=2,
        num_matrices=len(products),
        num_columns=num_columns,
        flags=OpFlags.NONE if rows.low is None else OpFlags.FINE,
    )
    pointers = (None if part is None else part.data_ptr() for part in rows)
    step = Step(num_rows=num_rows, activations=Activations(*pointers))
    step.registers[2] = Register(target.data_ptr() + 4 * GUARD, target.stride(0))
    _run(step, op, variant, num_threads)
    assert bool((target[:, :GUARD] == GUARD_VALUE).all() and (target[:, -GUARD:] == GUARD_VALUE).all())
    return target[:, GUARD:-GUARD]


def _quantised(
    kind: OpKind,
    x: Tensor,
    num_columns: int,
    variant: str,
    num_threads: int,
    is_fine: bool,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> QuantisedRows:
    num_rows, num_groups = len(x), num_columns // GROUP
    guarded = [
        torch.full((num_rows * count + GUARD,), GUARD_VALUE, dtype=dtype)
        for count, dtype in (
            (num_columns, torch.int8),
            (num_groups, torch.float32),
            (num_groups, torch.int32),
            (num_groups, torch.float32),
            (num_columns, torch.int8),
        )
    ]
    op = Op(
        weight=None if weight is None else weight.data_ptr(),
        kind=kind,
        source=3,
        num_columns=num_columns,
        eps=eps,
        flags=OpFlags.FINE if is_fine else OpFlags.NONE,
    )
    step = Step(num_rows=num_rows, activations=Activations(*(part.data_ptr() for part in guarded)))
    step.registers[3] = _register(x)
    _run(step, op, variant, num_threads)
    assert all(bool((part[-GUARD:] == GUARD_VALUE).all()) for part in guarded)
    if not is_fine:
        assert bool((guarded.pop() == GUARD_VALUE).all())
    return QuantisedRows(*(part[:-GUARD].view(num_rows, -1) for part in guarded))


def _matrices(products: Sequence[Product], memory: list[Tensor]) -> ctypes.Array[Matrix]:
    structs = []
    for product in products:
        tiles = product.weight.tiles.flatten()
        buffer = torch.empty(len(tiles) + 128, dtype=torch.uint8)
        first = -buffer.data_ptr() % 64 + product.misalignment
        buffer[first : first + len(tiles)] = tiles
        memory.append(buffer)
        structs.append(
            Matrix(
                tiles=buffer.data_ptr() + first,
                bias=None if product.bias is None else product.bias.data_ptr(),
                num_rows=product.weight.num_rows,
                num_columns=product.weight.shape[1],
                format=FORMATS[product.weight.format],
                first_output=product.first_output,
            )
        )
    return (Matrix * len(structs))(*structs)


def _register(rows: Tensor) -> Register:
    assert rows.stride(1) == 1
    return Register(rows.data_ptr(), rows.stride(0))


def _run(step: Step, op: Op, variant: str, num_threads: int) -> None:
    step.ops = (Op * 1)(op)
    step.num_ops = 1
    native_library().run(step, variant, num_threads)
