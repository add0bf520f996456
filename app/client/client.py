"""Every route of the service as a method."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Self

import httpx

from ..paths import Paths
from .errors import ServiceLostError
from .launch import COMMAND, ensure_running, wait_stopped
from .sse import read_events
from .tip import TIP, Tip
from .wire import body_of, check_status, valid_text, valid_values

Json = dict[str, Any]
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
NO_TIMEOUT = httpx.Timeout(None, connect=10.0)
"""For what may wait for a model to load."""


START_ATTEMPTS = 20
RETRY_S = 0.1


class Client:
    """Talks to this home's service over its unix socket.

    Every method raises `RefusedError` (the service said no, and why) or `ServiceLostError` (no answer).
    """

    def __init__(self, paths: Paths | None = None, command: Sequence[str] = COMMAND):
        """`command` starts a service when none runs."""
        self.paths = paths or Paths.from_env()
        self._command = command
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.paths.socket_path)),
            base_url="http://chatkv",
            headers={"Content-Type": "application/json"},
            timeout=TIMEOUT,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # The service

    async def ensure_service(self) -> Json:
        """Start the service if none runs; its status.

        Raises:
            UserError: it could not be started.
        """
        for _ in range(START_ATTEMPTS):
            await ensure_running(self.paths, self._command)
            # A service that is just dying may still take the connection, but not answer.
            with contextlib.suppress(ServiceLostError):
                return await self.status()
            await asyncio.sleep(RETRY_S)
        return await self.status()

    def is_same_version(self, status: Json) -> bool:
        """False: the service was started by another version; `stop` and `ensure_service` restart it."""
        return bool(status.get("version") == version("chatkv"))

    async def status(self) -> Json:
        return await self._get("/chatkv/status")

    async def stop(self, timeout_s: float = 20.0) -> bool:
        """End the service and wait until it is gone; False when it still runs after `timeout_s`."""
        await self._send("POST", "/chatkv/stop")
        return await wait_stopped(self.paths, timeout_s)

    async def events(self) -> AsyncGenerator[Json, None]:
        """Everything that happens, `hello` with the status first. Ends when the service stops or after `resync`."""
        async for event in self._stream("GET", "/chatkv/events"):
            yield event

    async def cancel_request(self, request_id: str) -> None:
        await self._send("POST", "/chatkv/cancel", {"request_id": request_id})

    async def stream_completion(self, body: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """Chunks of `/v1/chat/completions`; closing the generator ends the request."""
        async for event in self._stream("POST", "/v1/chat/completions", {**body, "stream": True}):
            yield event

    # Chats

    async def list_chats(
        self, query: str = "", limit: int = 1000, offset: int = 0, in_trash: bool = False
    ) -> list[Json]:
        found = await self._get("/chatkv/chats", query=query, limit=limit, offset=offset, trash=in_trash)
        return list(found["chats"])

    async def create_chat(
        self,
        title: str | None = None,
        model: str | None = None,
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        private: bool = False,
        draft: str | None = None,
    ) -> Json:
        fields = {"title": title, "model": model, "system": system, "sampling": sampling, "draft": draft}
        return (await self._send("POST", "/chatkv/chats", fields | {"private": private}))["chat"]

    async def get_chat(self, chat_id: str) -> Json:
        """`{"chat", "messages" (root to tip), "siblings", "seq"}`; events up to `seq` are in it already."""
        return await self._get(f"/chatkv/chats/{chat_id}")

    async def update_chat(self, chat_id: str, fields: Mapping[str, Any]) -> Json:
        """Any of title, draft, system, sampling, is_pinned, tip_id, context_start_id, model."""
        return (await self._send("PATCH", f"/chatkv/chats/{chat_id}", fields))["chat"]

    async def delete_chat(self, chat_id: str) -> Json:
        """`{"chat", "cache"}`: its text goes to the trash, its KV is gone (see `forget_cache`); what is being written
        there stops."""
        return await self._send("DELETE", f"/chatkv/chats/{chat_id}", timeout=NO_TIMEOUT)

    async def restore_chat(self, chat_id: str) -> Json:
        return (await self._send("POST", f"/chatkv/chats/{chat_id}/restore"))["chat"]

    async def fork_chat(self, chat_id: str, message_id: str) -> Json:
        return (await self._send("POST", f"/chatkv/chats/{chat_id}/fork", {"message_id": message_id}))["chat"]

    async def search(self, query: str, limit: int = 50) -> list[Json]:
        return list((await self._get("/chatkv/search", q=query, limit=limit))["hits"])

    async def export_chat(self, chat_id: str, format: str = "json") -> str:
        return (await self._request("GET", f"/chatkv/export/{chat_id}", params={"format": format})).text

    # Replies

    async def send_turn(self, chat_id: str, text: str, parent_id: str | Tip | None = TIP) -> Json:
        """`{"message", "reply"}` once the message is on disk; the reply comes as events. `parent_id` None: a root."""
        return await self._send("POST", f"/chatkv/chats/{chat_id}/turns", _turn(text, parent_id), NO_TIMEOUT)

    async def stream_turn(
        self, chat_id: str, text: str, parent_id: str | Tip | None = TIP
    ) -> AsyncGenerator[Json, None]:
        """This reply's events: `turn` with message and reply first, `reply_done` last. Closing it stops the reply."""
        body = _turn(text, parent_id) | {"stream": True}
        async for event in self._stream("POST", f"/chatkv/chats/{chat_id}/turns", body):
            yield event

    async def regenerate(self, chat_id: str, message_id: str | None = None) -> Json:
        """The new version, as begun."""
        body = {"message_id": message_id}
        return (await self._send("POST", f"/chatkv/chats/{chat_id}/regenerate", body, NO_TIMEOUT))["reply"]

    async def continue_reply(self, chat_id: str) -> Json:
        return (await self._send("POST", f"/chatkv/chats/{chat_id}/continue"))["reply"]

    async def cancel(self, chat_id: str) -> bool:
        """Stop what is being written in a chat; False when nothing was."""
        return bool((await self._send("POST", f"/chatkv/chats/{chat_id}/cancel"))["was_running"])

    # The cache

    async def cache(self) -> Json:
        """What every tier holds, and where each chat's blocks lie."""
        return await self._get("/chatkv/cache")

    async def warm_chat(self, chat_id: str, draft: str | None = None) -> Json:
        """Bring a chat's blocks to the device; with a draft, compute what the draft will need. Never loads a model.

        `{"is_started", "reason"}`; call it as often as the draft changes.
        """
        return await self._send("POST", f"/chatkv/chats/{chat_id}/warm", {"draft": draft})

    async def why_missed(self, chat_id: str | None = None) -> Json | None:
        """What was reused for the chat's last request (None: the last of all) and where its prefix was missed."""
        query = {} if chat_id is None else {"chat_id": chat_id}
        return (await self._get("/chatkv/cache/why", **query))["request"]

    async def forget_cache(self, chat_id: str) -> Json:
        """Remove a chat's blocks from everywhere; its text stays.

        `{"num_removed", "num_shared" (stay, because other chats need them), "is_complete"}`.
        """
        return await self._send("POST", "/chatkv/cache/forget", {"chat_id": chat_id}, NO_TIMEOUT)

    async def clear_cache(self) -> Json:
        """Remove all blocks of all chats and models from everywhere: `{"num_removed", "is_complete"}`."""
        return await self._send("POST", "/chatkv/cache/clear", timeout=NO_TIMEOUT)

    async def prune_cache(self) -> Json:
        """Remove what no installed model can use: `{"num_slabs", "num_blocks", "freed_bytes"}`."""
        return await self._send("POST", "/chatkv/cache/prune", timeout=NO_TIMEOUT)

    async def offload_chat(self, chat_id: str) -> Json:
        """Free the device of a chat's blocks that a lower tier holds too: `{"num_offloaded"}`."""
        return await self._send("POST", "/chatkv/cache/offload", {"chat_id": chat_id})

    async def verify_cache(self) -> AsyncGenerator[Json, None]:
        """Read and check every stored block; bad ones are removed. Closing the generator ends it.

        `{"type": "progress", "num_checked", "num_blocks"}`, and last `{"type": "done", "num_checked", "num_damaged"}`,
        or `{"type": "error", "message"}`.
        """
        async for event in self._stream("POST", "/chatkv/cache/verify"):
            yield event

    # Models

    async def list_models(self) -> list[Json]:
        return list((await self._get("/chatkv/models"))["models"])

    async def pull_model(self, name: str, as_name: str | None = None) -> Json:
        """The job; `job` events tell how it goes."""
        return (await self._send("POST", "/chatkv/models/pull", {"name": name, "as_name": as_name}))["job"]

    async def load_model(self, name: str) -> Json:
        """Begin to swap to a model; `model` events tell how it goes."""
        return (await self._send("POST", "/chatkv/models/load", {"name": name}))["model"]

    async def set_threads(self, num_threads: int) -> Json:
        """Of the CPU kernels, until the service ends. The model's status."""
        return (await self._send("POST", "/chatkv/threads", {"threads": num_threads}))["model"]

    async def remove_model(self, name: str, is_forced: bool = False) -> None:
        await self._request("DELETE", f"/chatkv/models/{name}", params={"force": is_forced})

    async def list_jobs(self) -> list[Json]:
        return list((await self._get("/chatkv/jobs"))["jobs"])

    async def cancel_job(self, job_id: str) -> Json:
        return (await self._send("DELETE", f"/chatkv/jobs/{job_id}"))["job"]

    # Inside

    async def _get(self, path: str, **params: Any) -> Json:
        return dict((await self._request("GET", path, params=params)).json())

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: httpx.Timeout = TIMEOUT
    ) -> Json:
        return dict((await self._request(method, path, body=body, timeout=timeout)).json())

    async def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> httpx.Response:
        try:
            answer = await self._http.request(
                method, valid_text(path), params=valid_values(params), content=body_of(body), timeout=timeout
            )
        except httpx.TransportError as error:
            raise ServiceLostError(str(error)) from error
        check_status(answer.status_code, answer.content)
        return answer

    async def _stream(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Json, None]:
        try:
            async with self._http.stream(method, path, content=body_of(body), timeout=NO_TIMEOUT) as answer:
                if answer.status_code >= 400:
                    check_status(answer.status_code, await answer.aread())
                async for event in read_events(answer.aiter_bytes()):
                    yield event
        except httpx.TransportError as error:
            raise ServiceLostError(str(error)) from error


def _turn(text: str, parent_id: str | Tip | None) -> Json:
    return {"text": text} if parent_id is TIP else {"text": text, "parent_id": parent_id}
