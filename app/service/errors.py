"""The one shape of every refusal on the socket, and which status each kind of error gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatkv.app.errors import UserError
from chatkv.engine.errors import (
    BrokenModelError,
    EngineError,
    InvalidRequestError,
    ModelStorageError,
    PromptTooLongError,
    QueueFullError,
    TemplateError,
    UnsupportedModelError,
)

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """A refusal with an HTTP status. `details` are further fields of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    @property
    def type(self) -> str:
        return _TYPE_OF_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields | self.details}


def not_found(message: str, code: str = "not_found") -> ApiError:
    return ApiError(404, message, code)


def stopping() -> ApiError:
    return ApiError(503, "The service is stopping.", "stopping", headers={"Retry-After": "5"})


def invalid_value(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_value", param=param)


def to_api_error(error: Exception) -> ApiError:
    """The refusal that an error of the engine or the app becomes. A bug (anything else) is a 500 without a trace."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            sizes = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.max_context_tokens}
            return ApiError(400, str(error), "context_length_exceeded", param="messages", details=sizes)
        case QueueFullError():
            return ApiError(429, str(error), "queue_full", headers={"Retry-After": str(error.retry_after_s)})
        case InvalidRequestError():
            return invalid_value(str(error), error.param)
        case TemplateError():
            return ApiError(400, str(error), "template_error", param="messages")
        case BrokenModelError() | UnsupportedModelError() | ModelStorageError():
            return ApiError(400, str(error), "model_unusable", param="model")
        case EngineError():
            return ApiError(400, str(error), "invalid_value")
        case UserError():
            return ApiError(400, str(error), "refused")
        case _:
            return ApiError(500, "chatkv made a mistake; the service's log file has the details.", "internal_error")
