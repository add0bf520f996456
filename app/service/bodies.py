"""Reading a request's JSON: bounded in bytes and depth, parsed off the event loop when it is large."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from chatkv.app.chats.database import clean_text

from .access import MAX_BODY_BYTES, too_large
from .errors import ApiError, invalid_value

MAX_DEPTH = 64
MAX_INLINE_BYTES = 64 * 1024
"""A larger body is parsed in a thread, so that other chats' tokens do not wait behind it."""
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair, which is no character and which UTF-8 cannot hold."""

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_json(request: Request, pool: Executor, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body's object. Lone surrogates in it are U+FFFD.

    Raises:
        ApiError: 411 without a length, 413 too large, 400 not JSON, too deep, or not an object; what `parse` raises.
    """

    def work(body: bytes) -> T:
        return parse(_parse(body))

    if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
        raise ApiError(411, "A JSON body is needed here, with its Content-Length.", "length_required")
    body = await _read(request)
    if len(body) > MAX_INLINE_BYTES:
        return await asyncio.get_running_loop().run_in_executor(pool, work, body)
    return work(body)


async def read_model(request: Request, pool: Executor, model: type[ModelT]) -> ModelT:
    """The body as `model`; no body is an empty object. Unknown fields are ignored."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    try:
        return await read_json(request, pool, model.model_validate) if has_body else model()
    except ValidationError as error:
        raise validation_error(error.errors()) from error


def validation_error(errors: Any) -> ApiError:
    """Pydantic's list of errors as one message that names the first field. The value itself is not repeated."""
    first = errors[0]
    param = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return invalid_value(f"{param}: {first['msg']}", param or None)


async def _read(request: Request) -> bytes:
    parts = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise too_large()
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(499, "The client left while sending the body.", "client_closed") from error
    return b"".join(parts)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise invalid_value(f"The JSON is nested more than {MAX_DEPTH} levels deep.") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError; neither message repeats the text.
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"The body is not valid JSON{where}.", "invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_kind(value)}.", "invalid_json")
    _check_depth(value)
    return _without_half_pairs(value) if _HALF_PAIR.search(body) else value


def _without_half_pairs(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _without_half_pairs(item) for key, item in value.items()}
    return [_without_half_pairs(item) for item in value] if isinstance(value, list) else value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise invalid_value(f"The JSON is nested more than {MAX_DEPTH} levels deep.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a bare value")
