"""The one client of the service that the terminal app and the commands share. Imports neither torch nor the engine.

The errors come at once, the rest at first use: httpx costs a tenth of a second, and the terminal app paints first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import RefusedError, ServiceLostError

if TYPE_CHECKING:
    from .client import Client
    from .launch import ensure_running, wait_stopped

__all__ = ["Client", "RefusedError", "ServiceLostError", "ensure_running", "wait_stopped"]

_MODULES = {"Client": ".client", "ensure_running": ".launch", "wait_stopped": ".launch"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
