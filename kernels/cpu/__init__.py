"""The torch CPU path: float32 weights, float32 KV, rows whose bits depend on nothing but themselves."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
