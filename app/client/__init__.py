"""The one client of the service that the terminal app and the commands share. Imports neither torch nor the engine."""

from .client import Client
from .errors import RefusedError, ServiceLostError
from .launch import ensure_running, wait_stopped

__all__ = ["Client", "RefusedError", "ServiceLostError", "ensure_running", "wait_stopped"]
