"""The ASGI app: routes, and every error in the one shape."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatkv.app.chats.errors import ChatNotFoundError, ChatStateError, StoreFullError
from chatkv.app.errors import UserError
from chatkv.engine.errors import EngineError

from .app_routes import AppRoutes
from .bodies import validation_error
from .cache_routes import CacheRoutes
from .chat_routes import ChatRoutes
from .errors import ApiError, to_api_error
from .openai_routes import OpenAiRoutes
from .responses import ErrorResponse
from .service import Service

log = logging.getLogger(__name__)


def create_app(service: Service) -> ASGIApp:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for routes in (OpenAiRoutes(service), ChatRoutes(service), CacheRoutes(service), AppRoutes(service)):
        app.include_router(routes.router)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (ApiError, UserError, EngineError, Exception):
        app.add_exception_handler(kind, _refused)
    return _Counted(app, service)


class _Counted:
    """Counts open requests, for the idle exit, and answers, for the metrics. Logs neither queries nor bodies."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._service.activity.request(scope["path"]):
            try:
                await self._app(scope, receive, watch)
            finally:
                route = getattr(scope.get("route"), "path", "unknown")
                self._service.metrics.responses.labels(route, str(status)).inc()
                log.debug("%s %s %d", scope["method"], route, status)


async def _refused(request: Request, error: Exception) -> Response:
    return ErrorResponse(app_error(error))


def app_error(error: Exception) -> ApiError:
    match error:
        case ChatNotFoundError():
            return ApiError(404, str(error), "chat_not_found")
        case ChatStateError():
            return ApiError(409, str(error), "chat_state")
        case StoreFullError():
            return ApiError(507, str(error), "no_space")
        case _:
            return to_api_error(error)


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ErrorResponse(validation_error(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        refusal = ApiError(404, f"There is no route {method} {path}.", "unknown_route")
    elif error.status_code == 405:
        refusal = ApiError(405, f"{path} does not take {method}.", "method_not_allowed", headers=error.headers)
    else:
        refusal = ApiError(error.status_code, str(error.detail), "refused", headers=error.headers)
    return ErrorResponse(refusal)
