"""Which kernels a GPU would compile: launches are noted and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Form = tuple[Any, ...]
"""A kernel's name, its constants, and the traits of arguments that triton specialises on."""


@contextmanager
def noted_forms() -> Iterator[set[Form]]:
    forms: set[Form] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        general = self.kwargs.get("do_not_specialize") or ()
        constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
        named = dict(zip(self.arg_names, args, strict=False)) | options
        traits = [
            (name, value if name in constants or name not in self.arg_names else _trait(value, name in general))
            for name, value in named.items()
        ]
        forms.add((self.fn.__name__, *sorted(traits, key=lambda trait: trait[0])))

    with patch.object(InterpretedFunction, "run", note):
        yield forms


def _trait(value: Any, is_general: bool) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value) if isinstance(value, float) else value
    if is_general:
        return int, abs(value) >= 1 << 31
    return value if value == 1 else (int, abs(value) >= 1 << 31, value % 16 == 0)
