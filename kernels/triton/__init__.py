"""The GPU path: Triton kernels with their launchers, one file per operation, each against its specification.

Imported only where a GPU runs a model: triton takes a second to load.
"""
