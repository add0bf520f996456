"""Kernels run in triton's interpreter here, on CPU tensors: `tests/conftest.py` asks for it before triton is loaded."""

from __future__ import annotations

from tests.kernels.triton import interpreter

interpreter.install()
