"""What the interpreter would not notice: accesses outside the arguments, races between programs, false hints.

Programs run one after another in the interpreter, so a race never shows in the numbers; an address outside of a tensor
reads what happens to lie there. A view's own extent counts, not its storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.runtime.interpreter as shipped

Array = np.ndarray


class MemoryViolation(AssertionError):
    """An access that a GPU would not forgive."""


class Extent(NamedTuple):
    name: str
    start: int
    end: int


class Access(NamedTuple):
    addresses: Array
    num_bytes: int
    """Of each."""
    program: int


class Launch:
    """The arguments of the launch that runs, and who touched what of them."""

    def __init__(self, extents: list[Extent]) -> None:
        self.extents = extents
        self.starts = np.array([extent.start for extent in extents], dtype=np.uint64)
        self.ends = np.array([extent.end for extent in extents], dtype=np.uint64)
        self.loads: dict[int, list[Access]] = defaultdict(list)
        self.stores: dict[int, list[Access]] = defaultdict(list)

    def check_bounds(self, addresses: Array, num_bytes: int, kind: str) -> int:
        """Index of the extent that holds the first of them (all, if there is no error)."""
        found = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        is_inside = (found >= 0) & (addresses + np.uint64(num_bytes) <= self.ends[np.maximum(found, 0)])
        if not is_inside.all():
            address = int(addresses[~is_inside][0])
            nearest = min(self.extents, key=lambda extent: max(extent.start - address, address - extent.end))
            raise MemoryViolation(
                f"out-of-bounds {kind} of {int((~is_inside).sum())} numbers in program {_builder().grid_idx}: nearest "
                f"to {nearest.name!r}, at byte {address - nearest.start} of {nearest.end - nearest.start}"
            )
        return int(found[0])

    def check_races(self) -> None:
        for extent, stores in self.stores.items():
            loads = self.loads[extent]
            is_mixed = len({access.num_bytes for access in (*stores, *loads)}) > 1
            addresses, programs = _by_address(stores, is_mixed)
            is_shared = (addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])
            if is_shared.any():
                first = int(np.argmax(is_shared))
                pair = f"{programs[first]} and {programs[first + 1]}"
                raise MemoryViolation(f"race: programs {pair} store to one address of {self.extents[extent].name!r}")
            if not loads:
                continue
            loaded, readers = _by_address(loads, is_mixed)
            place = np.minimum(np.searchsorted(addresses, loaded), addresses.size - 1)
            is_shared = (addresses[place] == loaded) & (programs[place] != readers)
            if is_shared.any():
                first = int(np.argmax(is_shared))
                raise MemoryViolation(
                    f"race: program {readers[first]} loads what program {programs[place[first]]} stores in the same "
                    f"launch, in {self.extents[extent].name!r}"
                )


_running: list[Launch] = []
"""The launch that runs, if any: launches do not nest."""


def install() -> None:
    builder, grid = shipped.InterpreterBuilder, shipped.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, grid.__call__
    exchange, modify = builder.create_atomic_cas, builder.create_atomic_rmw

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _note(pointers, mask, None, "load")
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _note(pointers, mask, value, "store")
        return store(self, pointers, value, mask, *rest, **options)

    def checked_exchange(self: Any, pointers: Any, *rest: Any) -> Any:
        _note(pointers, None, None, "atomic")
        return exchange(self, pointers, *rest)

    def checked_modify(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(pointers, mask, None, "atomic")
        return modify(self, operation, pointers, value, mask, *rest)

    def checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        _running[:] = [Launch(_merged(extent for name, arg in named for extent in _extents(name, arg)))]
        try:
            with np.errstate(all="ignore"):  # NaN and infinity come and go as on a GPU
                result = call(self, *args, **kwargs)
            _running[0].check_races()
        finally:
            _running.clear()
        return result

    builder.create_masked_load, builder.create_masked_store, grid.__call__ = checked_load, checked_store, checked_call
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_exchange, checked_modify


def checked_multiple_of(shipped_hint: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.multiple_of` that looks: the compiler believes it, and wide accesses of other addresses fail on a GPU."""

    def multiple_of(values: Any, multiple: Any) -> Any:
        if hasattr(values, "handle"):
            first = np.asarray(values.handle.data).flat[0]
            multiples = multiple if isinstance(multiple, (list, tuple)) else [multiple]
            if any(int(first) % int(getattr(number, "value", number)) for number in multiples):
                raise MemoryViolation(f"false hint: {int(first)} is not a multiple of {multiple}")
        return shipped_hint(values, multiple)

    return multiple_of


def checked_max_contiguous(shipped_hint: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.max_contiguous` that looks, for one dimension."""

    def max_contiguous(values: Any, length: Any) -> Any:
        if hasattr(values, "handle") and np.ndim(values.handle.data) == 1:
            number = length[0] if isinstance(length, (list, tuple)) else length
            runs = np.asarray(values.handle.data).reshape(-1, int(getattr(number, "value", number)))
            if (np.diff(runs.astype(np.int64), axis=1) != 1).any():
                raise MemoryViolation(f"false hint: no runs of {length} consecutive numbers")
        return shipped_hint(values, length)

    return max_contiguous


def _builder() -> Any:
    return shipped.interpreter_builder


def _note(pointers: Any, mask: Any, value: Any, kind: str) -> None:
    if not _running:
        return
    addresses = pointers.data
    if mask is not None:
        addresses, is_wanted = np.broadcast_arrays(addresses, mask.data)
        addresses = addresses[is_wanted]
    addresses = addresses.astype(np.uint64).ravel()
    if addresses.size == 0:
        return
    num_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    extent = _running[0].check_bounds(addresses, num_bytes, kind)
    if kind == "atomic":
        return
    if kind == "store" and addresses.size > 1:
        _check_lanes(
            addresses, np.broadcast_to(value.data, pointers.data.shape)[np.broadcast_to(mask.data, pointers.data.shape)]
        )
    index, grid = _builder().grid_idx, _builder().grid_dim
    program = (index[0] * grid[1] + index[1]) * grid[2] + index[2]
    accesses = _running[0].stores if kind == "store" else _running[0].loads
    accesses[extent].append(Access(addresses, num_bytes, program))


def _check_lanes(addresses: Array, values: Array) -> None:
    """Which of two numbers stays, where one store has both for one address, is chance."""
    order = np.argsort(addresses, kind="stable")
    addresses, values = addresses[order], values[order]
    is_same = addresses[1:] == addresses[:-1]
    if (is_same & (values[1:] != values[:-1])).any():
        raise MemoryViolation(f"race: one store has different numbers for one address, program {_builder().grid_idx}")


def _by_address(accesses: list[Access], is_mixed: bool) -> tuple[Array, Array]:
    """Addresses in order, each with its program; every byte's where numbers of different widths meet."""
    addresses, programs = [], []
    for access in accesses:
        spread = np.arange(access.num_bytes if is_mixed else 1, dtype=np.uint64)
        addresses.append(np.add.outer(access.addresses, spread).ravel())
        programs.append(np.full(addresses[-1].size, access.program))
    all_addresses, all_programs = np.concatenate(addresses), np.concatenate(programs)
    order = np.argsort(all_addresses, kind="stable")
    return all_addresses[order], all_programs[order]


def _extents(name: str, argument: Any) -> Iterator[Extent]:
    if isinstance(argument, tuple):
        for part in argument:
            yield from _extents(name, part)
        return
    tensor = argument if isinstance(argument, torch.Tensor) else getattr(argument, "base", None)
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        yield Extent(name, tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _merged(extents: Iterator[Extent]) -> list[Extent]:
    """In order of addresses; those that overlap (one tensor twice, views of one pool) are one."""
    merged: list[Extent] = []
    for extent in sorted(extents, key=lambda extent: extent.start):
        if merged and extent.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, extent.end))
        else:
            merged.append(extent)
    return merged
