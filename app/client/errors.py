"""What can go wrong between a client and the service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError


class RefusedError(UserError):
    """The service answered with an error object. `details` is that object (`code`, `param`, `choices`, ...)."""

    def __init__(self, status: int, details: Mapping[str, Any]):
        message, _, hint = str(details.get("message") or f"The service answered with status {status}.").partition("\n")
        super().__init__(message, hint)
        self.status = status
        self.details = dict(details)

    @property
    def code(self) -> str:
        return str(self.details.get("code") or "")


class ServiceLostError(UserError):
    """No answer: the service is not there, or went away in the middle of one."""

    def __init__(self, reason: str = ""):
        super().__init__(
            f"The chatkv service does not answer{f' ({reason})' if reason else ''}.",
            "What was sent is kept. Starting chatkv again starts the service; `chatkv status` tells where its log is.",
        )
