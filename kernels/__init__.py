"""Tensor operations, one backend per device."""
