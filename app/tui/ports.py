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

    async def create_chat(self, *, private: bool = False) -> JsonObject:
        """Of a private chat nothing is kept when the service ends, and nothing of its KV leaves memory."""

    async def get_chat(self, chat_id: str) -> JsonObject:
        """`{"chat", "messages", "siblings"}`."""

    async def update_chat(self, chat_id: str, fields: Mapping[str, Any]) -> JsonObject: ...

    async def delete_chat(self, chat_id: str) -> JsonObject:
        """`{"chat", "cache": {"num_removed", "num_shared"}}`: the text goes to the trash, what was cached is gone."""

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

    async def warm_chat(self, chat_id: str, draft: str | None = None) -> JsonObject:
        """Bring a chat's blocks to the device; with a draft, compute what it will need: `{"is_started", "reason"}`."""

    async def offload_chat(self, chat_id: str) -> JsonObject:
        """`{"num_offloaded"}` blocks left the device; a lower tier has them."""

    async def forget_cache(self, chat_id: str) -> JsonObject:
        """`{"num_removed", "num_shared"}`: blocks of other chats stay, and so does the text."""

    def verify_cache(self) -> AsyncGenerator[JsonObject, None]:
        """Reads every stored block: `progress` events with `num_checked` and `num_blocks`, and last `done` with
        `num_checked` and `num_damaged`."""

    async def why_missed(self, chat_id: str | None = None) -> JsonObject | None:
        """What was reused for the chat's last request, and its `miss`."""

    async def stop(self) -> bool:
        """End the service; `events` ends, and `ensure_service` starts it again."""

    def is_same_version(self, status: JsonObject) -> bool: ...
