"""The part of the service that the app needs: `chatkv.app.client.Client` has it, and a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from chatkv.app.client.errors import RefusedError, ServiceLostError
from chatkv.app.client.tip import Tip
from chatkv.app.errors import UserError

__all__ = ["ChatService", "JsonObject", "RefusedError", "ServiceLostError", "UserError"]

JsonObject = dict[str, Any]


class ChatService(Protocol):
    """Every method may raise `RefusedError` (the service said no) or `ServiceLostError` (no answer)."""

    async def ensure_service(self) -> JsonObject:
        """Start the service if none runs; its status. Raises `UserError` when it cannot be started."""

    def events(self) -> AsyncGenerator[JsonObject, None]:
        """All that happens, until the connection breaks. The first event is `hello` with the status."""

    async def close(self) -> None: ...

    async def list_chats(self) -> list[JsonObject]: ...

    async def create_chat(self) -> JsonObject: ...

    async def get_chat(self, chat_id: str) -> JsonObject:
        """`{"chat", "messages", "siblings"}`."""

    async def update_chat(self, chat_id: str, fields: Mapping[str, Any]) -> JsonObject: ...

    async def delete_chat(self, chat_id: str) -> JsonObject: ...

    async def restore_chat(self, chat_id: str) -> JsonObject: ...

    async def fork_chat(self, chat_id: str, message_id: str) -> JsonObject: ...

    async def send_turn(self, chat_id: str, text: str, parent_id: str | Tip | None = ...) -> JsonObject:
        """`{"message", "reply"}`; without a `parent_id` the turn follows the tip, None puts it at the root."""

    async def regenerate(self, chat_id: str, message_id: str | None = None) -> JsonObject: ...

    async def continue_reply(self, chat_id: str) -> JsonObject: ...

    async def cancel(self, chat_id: str) -> bool: ...

    async def search(self, query: str) -> list[JsonObject]: ...

    async def export_chat(self, chat_id: str, format: str = "json") -> str: ...

    async def list_models(self) -> list[JsonObject]: ...

    async def pull_model(self, name: str) -> JsonObject: ...

    async def load_model(self, name: str) -> JsonObject: ...

    async def remove_model(self, name: str, is_forced: bool = False) -> None: ...

    async def cancel_job(self, job_id: str) -> JsonObject: ...

    async def cache(self) -> JsonObject: ...
