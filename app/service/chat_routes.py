"""The app's own routes for conversations, on the unix socket only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from chatkv.app.chats.records import Chat, ChatSettings, ChatSummary
from chatkv.app.chats.store import ChatStore

from .bodies import read_model
from .chat_prompt import chat_sampling
from .errors import ApiError, invalid_value
from .responses import JsonResponse
from .service import Service
from .sse import EventStream


class NewChat(BaseModel):
    title: str | None = None
    model: str | None = None
    system: str | None = None
    sampling: dict[str, Any] | None = None
    private: bool | None = None
    draft: str | None = None


class ChatChange(BaseModel):
    title: str | None = None
    draft: str | None = None
    is_pinned: bool | None = None
    tip_id: str | None = None
    context_start_id: str | None = None
    model: str | None = None
    system: str | None = None
    sampling: dict[str, Any] | None = None

    def changes(self) -> dict[str, Any]:
        """What the store is told. A null means absent, except where it takes a value away."""
        named = self.model_fields_set - {"system", "sampling"}
        return {
            name: getattr(self, name)
            for name in named
            if getattr(self, name) is not None or name in ("context_start_id", "model")
        }


class Turn(BaseModel):
    text: str = Field(pattern=r"\S")
    parent_id: str | None = None
    """The message it answers; absent: the chat's tip; null: none, a new beginning."""
    stream: bool = False
    """Answer with this reply's events; leaving then stops the reply."""


class MessageRef(BaseModel):
    message_id: str | None = None


class ChatRoutes:
    def __init__(self, service: Service):
        self.service = service
        self.router = APIRouter(prefix="/chatkv")
        add = self.router.add_api_route
        add("/chats", self.list_chats, methods=["GET"])
        add("/chats", self.create, methods=["POST"], status_code=201)
        add("/chats/{chat_id}", self.show, methods=["GET"])
        add("/chats/{chat_id}", self.change, methods=["PATCH"])
        add("/chats/{chat_id}", self.delete, methods=["DELETE"])
        add("/chats/{chat_id}/restore", self.restore, methods=["POST"])
        add("/chats/{chat_id}/fork", self.fork, methods=["POST"])
        add("/chats/{chat_id}/turns", self.turn, methods=["POST"])
        add("/chats/{chat_id}/regenerate", self.regenerate, methods=["POST"])
        add("/chats/{chat_id}/continue", self.go_on, methods=["POST"])
        add("/chats/{chat_id}/cancel", self.cancel, methods=["POST"])
        add("/search", self.search, methods=["GET"])
        add("/export/{chat_id}", self.export, methods=["GET"])

    async def list_chats(
        self,
        query: str = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        trash: bool = False,
    ) -> Response:
        chats = await self.service.chats.run(lambda store: store.list_chats(query, limit, offset, in_trash=trash))
        return JsonResponse({"chats": [self._summary(chat) for chat in chats]})

    async def create(self, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, NewChat)
        settings = _settings(wanted.system or "", wanted.sampling or {})

        def write(store: ChatStore) -> Chat:
            chat = store.create_chat(wanted.title or "", wanted.model, settings, bool(wanted.private))
            return store.update_chat(chat.id, draft=wanted.draft) if wanted.draft else chat

        chat = await self.service.chats.run(write)
        self.service.events.publish("chat_created", chat=self._summary(chat))
        return JsonResponse({"chat": self._full(chat)}, status_code=201)

    async def show(self, chat_id: str) -> Response:
        def read(store: ChatStore) -> tuple[Chat, list[dict[str, Any]], dict[str, list[str]]]:
            chat = store.get_chat(chat_id)
            messages = [message.to_json() for message in store.path(chat_id)] if chat.tip_id else []
            return chat, messages, store.siblings_on_path(chat_id)

        chat, messages, siblings = await self.service.chats.run(read)
        # What is being written is newer in memory than on disk; `seq` tells a reader which events are in it already.
        messages = self.service.replies.newest(messages)
        return JsonResponse(
            {"chat": self._full(chat), "messages": messages, "siblings": siblings, "seq": self.service.events.seq}
        )

    async def change(self, chat_id: str, request: Request) -> Response:
        """Only the fields that are sent; a null `context_start_id` or `model` takes the value away."""
        wanted = await read_model(request, self.service.text_pool, ChatChange)
        chat = await self.service.chats.run(lambda store: _apply(store, chat_id, wanted))
        if wanted.is_pinned is not None:
            await self.service.cache.set_pinned(chat_id, wanted.is_pinned)
        self.service.events.publish("chat_updated", chat=self._summary(chat))
        return JsonResponse({"chat": self._full(chat)})

    async def delete(self, chat_id: str) -> Response:
        """The text goes to the trash, the KV at once; the answer comes when nothing of it is left in any file."""
        await self.service.replies.stop_and_wait(chat_id)
        chat = await self.service.chats.run(lambda store: store.trash(chat_id))
        self.service.events.publish("chat_deleted", chat=self._summary(chat))
        forgotten = await self.service.cache.forget(chat_id)
        return JsonResponse({"chat": self._full(chat), "cache": forgotten.to_json()})

    async def restore(self, chat_id: str) -> Response:
        chat = await self.service.chats.run(lambda store: store.restore(chat_id))
        self.service.events.publish("chat_created", chat=self._summary(chat))
        return JsonResponse({"chat": self._full(chat)})

    async def fork(self, chat_id: str, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, MessageRef)
        if not wanted.message_id:
            raise invalid_value("message_id is missing: the message where the fork begins.", "message_id")
        message_id = wanted.message_id
        chat = await self.service.chats.run(lambda store: store.fork(chat_id, message_id))
        await self.service.forks.add(chat.id, chat_id)
        self.service.events.publish("chat_created", chat=self._summary(chat))
        return JsonResponse({"chat": self._full(chat)}, status_code=201)

    async def turn(self, chat_id: str, request: Request) -> Response:
        """202 once the message is committed. The reply goes on whoever leaves; with `stream`, it stops then."""
        wanted = await read_model(request, self.service.text_pool, Turn)
        is_root = "parent_id" in wanted.model_fields_set and wanted.parent_id is None
        user, reply = await self.service.replies.start_turn(chat_id, wanted.text, wanted.parent_id, is_root)
        if not wanted.stream:
            return JsonResponse({"message": user.to_json(), "reply": reply.to_json()}, status_code=202)
        subscriber = self.service.events.subscribe(reply.id)  # At once: the reply's first events may come any moment.
        first = {"type": "turn", "message": user.to_json(), "reply": reply.to_json()}

        def on_close() -> None:
            self.service.events.unsubscribe(subscriber)
            live = self.service.replies.live(chat_id)
            if live is not None and live.message.id == reply.id:
                live.stop()

        return EventStream(subscriber.stream(first, self.service.keep_alive_s), on_close)

    async def regenerate(self, chat_id: str, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, MessageRef)
        reply = await self.service.replies.regenerate(chat_id, wanted.message_id)
        return JsonResponse({"reply": reply.to_json()}, status_code=202)

    async def go_on(self, chat_id: str) -> Response:
        reply = await self.service.replies.continue_reply(chat_id)
        return JsonResponse({"reply": reply.to_json()}, status_code=202)

    async def cancel(self, chat_id: str) -> Response:
        return JsonResponse({"ok": True, "was_running": self.service.replies.stop(chat_id)})

    async def search(self, q: str = "", limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        hits = await self.service.chats.run(lambda store: store.search(q, limit))
        return JsonResponse({"hits": [hit.to_json() for hit in hits]})

    async def export(self, chat_id: str, format: Literal["json", "markdown"] = "json") -> Response:
        text = await self.service.chats.run(lambda store: store.export_chat(chat_id, format))
        media_type = "application/json" if format == "json" else "text/markdown"
        return PlainTextResponse(text, media_type=media_type)

    def _summary(self, chat: ChatSummary) -> dict[str, Any]:
        return ChatSummary.to_json(chat, self.service.replies.state(chat.id))

    def _full(self, chat: Chat) -> dict[str, Any]:
        return chat.to_json(self.service.replies.state(chat.id))


def _apply(store: ChatStore, chat_id: str, wanted: ChatChange) -> Chat:
    changes = wanted.changes()
    if wanted.system is not None or wanted.sampling is not None:
        old = store.get_chat(chat_id).settings
        system = old.system if wanted.system is None else wanted.system
        sampling = old.sampling if wanted.sampling is None else wanted.sampling
        changes["settings"] = _settings(system, sampling)
    if wanted.tip_id is not None:  # Another branch: what was said after that message comes back with it.
        changes["tip_id"] = store.newest_leaf(chat_id, wanted.tip_id)
    return store.update_chat(chat_id, **changes)


def _settings(system: str, sampling: dict[str, Any]) -> ChatSettings:
    """Raises ApiError 400: a value of the wrong type or out of range; nothing is stored then."""
    try:
        settings = ChatSettings.from_json({"system": system, "sampling": sampling})
    except ValueError as error:
        raise ApiError(400, f"{error}.", "invalid_value", param="sampling") from error
    chat_sampling(settings, None)
    return settings
