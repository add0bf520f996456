"""Fixtures of the service's tests."""

from .support import home, running  # noqa: F401
