"""Who may talk to the service: the gate in front of the app, one policy for each kind of socket.

The unix socket is guarded by file modes and the peer's uid, so it needs no key and no Host check. The TCP socket can be
reached by every local user and, through DNS rebinding or forms, by web pages: key, Host and Origin are checked there.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .responses import ErrorResponse, NoContent

MAX_BODY_BYTES = 32 * 2**20
OPEN_PATHS = frozenset({"/health", "/v1/health"})
APP_PREFIX = "/chatkv/"
"""The app's own routes: chats, jobs, models. They exist on the unix socket only."""


@dataclass(frozen=True, slots=True)
class TcpPolicy:
    """What a request over TCP must show."""

    key: str | None
    """None: no key is asked for."""
    hosts: frozenset[str]
    """Allowed Host names, without port: the address we bound, and loopback names."""
    port: int
    allowed_origins: frozenset[str] = frozenset()

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raises ApiError: 403 for a foreign Host or Origin, 401 without the key, 404 for the app's own routes."""
        self._check_host(headers.get("host", ""))
        self._check_origin(headers)
        if method == "OPTIONS":
            return
        if path not in OPEN_PATHS:
            self._check_key(headers)
        if f"{path}/".startswith(APP_PREFIX):
            raise ApiError(404, f"There is no route {path} on the TCP socket.", "unknown_route")

    def _check_host(self, value: str) -> None:
        host, port = _split_host(value)
        is_local_name = host == "localhost" or host.endswith(".localhost")
        if (host in self.hosts or is_local_name) and port in (None, self.port):
            return
        raise ApiError(
            403,
            f"The Host header '{value}' is not allowed: use http://127.0.0.1:{self.port} or http://localhost:{self.port}.",
            "host_not_allowed",
        )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and origin not in self.allowed_origins:
            raise ApiError(
                403,
                f"Requests of the page {origin} are refused (setting: allowed_origins).",
                "origin_not_allowed",
            )
        if origin is None and headers.get("sec-fetch-site") == "cross-site":
            raise ApiError(403, "Cross-site requests of a browser are refused.", "origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        if self.key is None:
            return
        if any(_is_same(candidate, self.key) for candidate in _keys(headers)):
            return
        raise ApiError(
            401,
            "The API key is missing or wrong: send 'Authorization: Bearer KEY'. `chatkv status` names the key file.",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def cors_headers(self, origin: str | None) -> dict[str, str]:
        if origin is None or origin not in self.allowed_origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": "authorization, content-type, x-api-key, api-key",
            "Vary": "Origin",
        }


class Gate:
    """ASGI middleware: refuses before the app sees the request. `policy` None is the unix socket."""

    def __init__(self, app: ASGIApp, policy: TcpPolicy | None):
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        scope["chatkv_is_unix"] = self.policy is None
        cors = self.policy.cors_headers(headers.get("origin")) if self.policy else {}
        try:
            if self.policy:
                self.policy.check(scope["method"], scope["path"], headers)
            _check_body(scope["method"], headers, is_tcp=self.policy is not None)
        except ApiError as error:
            error.headers["Connection"] = "close"  # A body that nobody reads may still be on its way.
            await ErrorResponse(error)(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await NoContent({"Allow": "GET, POST, OPTIONS"} | cors)(scope, receive, send)
            return
        await self.app(scope, receive, _with_headers(send, cors) if cors else send)


def _check_body(method: str, headers: Headers, is_tcp: bool) -> None:
    """A body must be JSON (a form of a web page needs no preflight, so it is never accepted) and of bounded size."""
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise ApiError(400, "The Content-Length header is not a number.", "invalid_value")
    has_body = int(length) > 0 or "transfer-encoding" in headers
    if int(length) > MAX_BODY_BYTES:
        raise too_large()
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if (has_body or (is_tcp and method in ("POST", "PUT", "PATCH"))) and media_type != "application/json":
        raise ApiError(
            415,
            f"Send the body as JSON with the header 'Content-Type: application/json' (got '{media_type}'); "
            "with curl: -H 'Content-Type: application/json'.",
            "unsupported_media_type",
        )
    if has_body and headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not accepted.", "unsupported_media_type")


def too_large() -> ApiError:
    message = f"The body is larger than {MAX_BODY_BYTES >> 20} MiB."
    return ApiError(413, message, "body_too_large", headers={"Connection": "close"})


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    raw = [(name.lower().encode(), value.encode()) for name, value in extra.items()]

    async def send_with_headers(message) -> None:  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *raw]}
        await send(message)

    return send_with_headers


def _split_host(value: str) -> tuple[str, int | None]:
    """`[::1]:80`, `localhost:80`, `127.0.0.1` -> host without brackets, port."""
    value = value.strip().lower()
    if value.startswith("["):
        host, _, rest = value[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = value.partition(":")
    if not port:
        return host, None
    return host, int(port) if port.isascii() and port.isdigit() else -1


def _keys(headers: Headers) -> Iterable[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for name in ("x-api-key", "api-key"):
        if value := headers.get(name):
            yield value.strip()


def _is_same(candidate: str, key: str) -> bool:
    """Constant time, whatever the lengths and bytes (`compare_digest` refuses non-ASCII strings)."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (candidate, key))
    return hmac.compare_digest(*digests)
