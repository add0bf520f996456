"""The app's own routes for the cache, on the unix socket only."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from .bodies import read_model
from .errors import ApiError
from .responses import JsonResponse, sse_event
from .service import Service
from .sse import EventStream


class ChatRef(BaseModel):
    chat_id: str


class Draft(BaseModel):
    draft: str | None = None
    """What is typed so far; null: the chat was opened."""


class CacheRoutes:
    def __init__(self, service: Service):
        self.service = service
        self.router = APIRouter(prefix="/chatkv")
        add = self.router.add_api_route
        add("/cache", self.show, methods=["GET"])
        add("/cache/why", self.why, methods=["GET"])
        add("/cache/forget", self.forget, methods=["POST"])
        add("/cache/clear", self.clear, methods=["POST"])
        add("/cache/prune", self.prune, methods=["POST"])
        add("/cache/offload", self.offload, methods=["POST"])
        add("/cache/verify", self.verify, methods=["POST"])
        add("/chats/{chat_id}/warm", self.warm, methods=["POST"])

    async def show(self) -> Response:
        return JsonResponse(await self.service.cache_report())

    async def why(self, chat_id: str | None = None) -> Response:
        """What the newest request found; null: none since the start, or its text was forgotten."""
        return JsonResponse({"request": self.service.requests.find(chat_id)})

    async def forget(self, request: Request) -> Response:
        """The chat stays, its blocks go."""
        wanted = await read_model(request, self.service.text_pool, ChatRef)
        chat_id = wanted.chat_id
        await self.service.chats.run(lambda store: store.get_chat(chat_id))
        if self.service.replies.state(chat_id) != "idle":
            raise ApiError(409, "A reply is being written in this chat. Wait for it, or stop it.", "chat_busy")
        return JsonResponse((await self.service.cache.forget(chat_id)).to_json())

    async def clear(self) -> Response:
        forgotten = await self.service.cache.clear()
        return JsonResponse({"num_removed": forgotten.num_removed, "is_complete": forgotten.is_complete})

    async def prune(self) -> Response:
        return JsonResponse(await self.service.cache.prune())

    async def offload(self, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, ChatRef)
        chat_id = wanted.chat_id
        await self.service.chats.run(lambda store: store.get_chat(chat_id))
        return JsonResponse({"num_offloaded": await self.service.cache.offload(chat_id)})

    async def verify(self) -> Response:
        """Progress as events, the result last. Leaving ends the check."""
        found = self.service.cache.verify()
        first = await anext(found)  # What can be refused is refused before the headers.

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield sse_event(first)
                async for event in found:
                    yield sse_event(event)
            finally:
                await found.aclose()

        return EventStream(events(), on_close=lambda: None)

    async def warm(self, chat_id: str, request: Request) -> Response:
        """202 at once; how far it came shows in the cache."""
        wanted = await read_model(request, self.service.text_pool, Draft)
        if self.service.replies.state(chat_id) != "idle":
            reason: str | None = "chat_busy"
        else:
            reason = await self.service.warmer.warm(chat_id, wanted.draft)
        return JsonResponse({"is_started": reason is None, "reason": reason}, status_code=202)
