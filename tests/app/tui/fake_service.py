"""A service that plays what a test tells it to, behind the port of the terminal app."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from chatkv.app.client.tip import TIP, Tip
from chatkv.app.tui.ports import RefusedError, ServiceLostError

READY = {"name": "smollm2-135m", "state": "ready", "progress": 1.0, "context_tokens": 8192, "weight_format": "int4"}
NO_MODEL = {"name": "", "state": "no_model", "progress": 0.0, "context_tokens": 0}
CATALOGUE = [
    {
        "name": "smollm2-135m",
        "installed": False,
        "loaded": False,
        "download_bytes": 101_000_000,
        "size_bytes": 101_000_000,
        "licence": "Apache-2.0",
        "context_tokens": 8192,
        "description": "Small, for a first try",
        "fits": True,
    },
    {"name": "qwen3-4b", "installed": False, "download_bytes": 2_400_000_000, "licence": "Apache-2.0", "fits": True},
]
APP_VERSION = "1.0"
_END = object()


def cache_state(*chats: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """What `GET /chatkv/cache` answers on a CPU."""
    device = {"used_bytes": 1_900_000_000, "limit_bytes": 2_200_000_000, "num_blocks": 1112, "hit_tokens_24h": 9100}
    disk = {"state": "on", "notice": None, "used_bytes": 11e9, "limit_bytes": 40e9, "num_blocks": 6120, "num_queued": 0,
            "hit_tokens_24h": 400, "written_today_bytes": 1.2e9, "read_bytes_per_s": 1.4e9, "slabs": []}  # fmt: skip
    return {
        "model": "smollm2-135m",
        "model_state": "ready",
        "kv_dtype": "fp32",
        "block_size": 16,
        "block_bytes": 737_280,
        "tiers": {"device": device, "host": None, "disk": disk},
        "computed_tokens_24h": 500,
        "prompt_tokens_24h": 10_000,
        "chats": [dict(chat) for chat in chats],
        "shared": [],
        "evicts_next": None,
        **fields,
    }


def chain(chat_id: str, title: str, *runs: tuple[str, int], **fields: Any) -> dict[str, Any]:
    """One of its `chats`."""
    num_blocks = sum(count for _, count in runs)
    usual = {"num_tokens": 16 * num_blocks + 3, "last_used_at": 1.0, "resume_s": 0.9, "compute_s": 14.6}
    return {"chat_id": chat_id, "title": title, "runs": [list(run) for run in runs], **usual, **fields}


def refused(message: str, code: str, status: int = 400, **details: Any) -> RefusedError:
    return RefusedError(status, {"message": message, "code": code, **details})


class FakeService:
    def __init__(self, model: Mapping[str, Any] = READY):
        self.model = dict(model)
        self.chats: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, list[dict[str, Any]]] = {}
        self.siblings: dict[str, dict[str, list[str]]] = {}
        self.trash: dict[str, dict[str, Any]] = {}
        self.models = [dict(model) for model in CATALOGUE]
        self.hits: list[dict[str, Any]] = []
        self.cache_state: dict[str, Any] = cache_state()
        self.verify_events: list[dict[str, Any]] = []
        self.verify_may_go_on = asyncio.Event()
        """The last of `verify_events` comes when this is set."""
        self.warm_reason: str | None = None
        self.why: dict[str, Any] | None = None
        self.version = "1.0"
        self.calls: list[tuple[Any, ...]] = []
        self.is_lost = False
        self.refusals: dict[str, RefusedError] = {}
        """Method name -> what it raises, once."""
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._seq = itertools.count(1)
        self._ids = itertools.count(1)

    # What a test does

    def emit(self, kind: str, **fields: Any) -> None:
        self._events.put_nowait({"seq": next(self._seq), "type": kind, **fields})

    def status(self, **fields: Any) -> dict[str, Any]:
        status = {"model": self.model, "device": "cpu", "batch_size": 0, "num_running": 0, "num_waiting": 0}
        return {**status, "version": self.version, "kv_usage": 0.12, **fields}

    def emit_status(self, **fields: Any) -> None:
        self.emit("status", status=self.status(**fields))

    def set_model(self, **fields: Any) -> None:
        self.model.update(fields)
        self.emit("model", model=self.model)

    def break_connection(self) -> None:
        self.is_lost = True
        self._events.put_nowait(_END)

    def add_chat(self, title: str, *messages: tuple[str, str], **fields: Any) -> str:
        """A chat with (role, content) messages."""
        chat_id = f"chat-{next(self._ids)}"
        chat = {"id": chat_id, "title": title, "updated_at": 1.0, "state": "idle", "num_tokens": 0, **fields}
        self.chats[chat_id] = chat
        self.messages[chat_id] = []
        for role, content in messages:
            self.add_message(chat_id, role, content)
        return chat_id

    def add_message(self, chat_id: str, role: str, content: str, **fields: Any) -> dict[str, Any]:
        path = self.messages[chat_id]
        message = {
            "id": f"message-{next(self._ids)}",
            "chat_id": chat_id,
            "parent_id": path[-1]["id"] if path else None,
            "role": role,
            "content": content,
            "status": "complete",
            "created_at": 1.0,
            "model": "smollm2-135m" if role == "assistant" else None,
            **fields,
        }
        path.append(message)
        return message

    def write(self, chat_id: str, text: str, tokens_per_s: float = 31.0) -> None:
        """The reply at the end of the chat goes on by `text`."""
        reply = self.messages[chat_id][-1]
        self.emit(
            "reply_delta",
            chat_id=chat_id,
            message_id=reply["id"],
            text=text,
            offset=len(reply["content"]),
            num_tokens=1,
            tokens_per_s=tokens_per_s,
        )
        reply["content"] += text

    def finish(self, chat_id: str, status: str = "complete", **stats: Any) -> None:
        reply = self.messages[chat_id][-1]
        reply["status"] = status
        figures = {"num_prompt_tokens": 100, "num_cached_tokens": 64, "ttft_s": 0.19, "tokens_per_s": 31.4}
        reply["stats"] = figures | stats
        self.chats[chat_id]["state"] = "idle"
        self.emit("reply_done", chat_id=chat_id, message=dict(reply))

    def begin_reply(self, chat_id: str) -> dict[str, Any]:
        reply = self.add_message(chat_id, "assistant", "", status="incomplete")
        self.chats[chat_id]["state"] = "waiting"
        self.emit("message_added", chat_id=chat_id, message=dict(reply))
        self.emit("reply_progress", chat_id=chat_id, message_id=reply["id"], phase="waiting")
        return reply

    # The port

    async def ensure_service(self) -> dict[str, Any]:
        if self.is_lost:
            raise ServiceLostError
        return self.status()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        yield {"seq": 0, "type": "hello", "status": self.status()}
        while True:
            event = await self._events.get()
            if event is _END:
                return
            yield event

    async def close(self) -> None:
        self.calls.append(("close",))

    async def list_chats(self) -> list[dict[str, Any]]:
        self._call("list_chats")
        return [dict(chat) for chat in self.chats.values()]

    async def create_chat(self, *, private: bool = False) -> dict[str, Any]:
        self._call("create_chat", private)
        return dict(self.chats[self.add_chat("", is_private=private)])

    async def get_chat(self, chat_id: str) -> dict[str, Any]:
        self._call("get_chat", chat_id)
        return {
            "chat": dict(self._chat(chat_id)),
            "messages": [dict(message) for message in self.messages[chat_id]],
            "siblings": self.siblings.get(chat_id, {}),
        }

    async def update_chat(self, chat_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._call("update_chat", chat_id, dict(fields))
        self._chat(chat_id).update(fields)
        return dict(self._chat(chat_id))

    async def delete_chat(self, chat_id: str) -> dict[str, Any]:
        self._call("delete_chat", chat_id)
        self.trash[chat_id] = self.chats.pop(chat_id)
        return {"chat": dict(self.trash[chat_id]), "cache": {"num_removed": 12, "num_shared": 3}}

    async def restore_chat(self, chat_id: str) -> dict[str, Any]:
        self._call("restore_chat", chat_id)
        self.chats[chat_id] = self.trash.pop(chat_id)
        return dict(self.chats[chat_id])

    async def fork_chat(self, chat_id: str, message_id: str) -> dict[str, Any]:
        self._call("fork_chat", chat_id, message_id)
        fork = self.add_chat(self._chat(chat_id)["title"] + " (fork)")
        ids = [message["id"] for message in self.messages[chat_id]]
        self.messages[fork] = list(self.messages[chat_id][: ids.index(message_id) + 1])
        return dict(self.chats[fork])

    async def send_turn(self, chat_id: str, text: str, parent_id: str | Tip | None = TIP) -> dict[str, Any]:
        self._call("send_turn", chat_id, text, parent_id)
        if parent_id is not TIP:
            ids = [message["id"] for message in self.messages[chat_id]]
            end = ids.index(str(parent_id)) + 1 if parent_id else 0
            del self.messages[chat_id][end:]
        message = self.add_message(chat_id, "user", text)
        self._chat(chat_id)["title"] = self._chat(chat_id)["title"] or text[:40]
        self._chat(chat_id)["draft"] = ""
        self.emit("message_added", chat_id=chat_id, message=dict(message))
        self.emit("chat_updated", chat=dict(self._chat(chat_id)))
        return {"message": dict(message), "reply": dict(self.begin_reply(chat_id))}

    async def regenerate(self, chat_id: str, message_id: str | None = None) -> dict[str, Any]:
        self._call("regenerate", chat_id, message_id)
        old = self.messages[chat_id].pop()
        reply = self.begin_reply(chat_id)
        self.siblings.setdefault(chat_id, {})[reply["id"]] = [old["id"], reply["id"]]
        return dict(reply)

    async def continue_reply(self, chat_id: str) -> dict[str, Any]:
        self._call("continue_reply", chat_id)
        self.messages[chat_id][-1]["status"] = "incomplete"
        self.chats[chat_id]["state"] = "waiting"
        return dict(self.messages[chat_id][-1])

    async def cancel(self, chat_id: str) -> bool:
        self._call("cancel", chat_id)
        self.finish(chat_id, "stopped")
        return True

    async def search(self, query: str) -> list[dict[str, Any]]:
        self._call("search", query)
        return list(self.hits)

    async def export_chat(self, chat_id: str, format: str = "json") -> str:
        self._call("export_chat", chat_id, format)
        return "\n".join(message["content"] for message in self.messages[chat_id])

    async def list_models(self) -> list[dict[str, Any]]:
        self._call("list_models")
        return [dict(model) for model in self.models]

    async def pull_model(self, name: str) -> dict[str, Any]:
        self._call("pull_model", name)
        return {"id": "job-1", "name": name, "stage": "resolve", "state": "running"}

    async def load_model(self, name: str) -> dict[str, Any]:
        self._call("load_model", name)
        self.set_model(name=name, state="loading", progress=0.0)
        return dict(self.model)

    async def remove_model(self, name: str, is_forced: bool = False) -> None:
        self._call("remove_model", name, is_forced)

    async def cancel_job(self, job_id: str) -> dict[str, Any]:
        self._call("cancel_job", job_id)
        self.emit("job", job={"id": job_id, "name": "smollm2-135m", "state": "cancelled"})
        return {"id": job_id}

    async def cache(self) -> dict[str, Any]:
        self._call("cache")
        return dict(self.cache_state)

    async def warm_chat(self, chat_id: str, draft: str | None = None) -> dict[str, Any]:
        self._call("warm_chat", chat_id, draft)
        return {"is_started": self.warm_reason is None, "reason": self.warm_reason}

    async def offload_chat(self, chat_id: str) -> dict[str, Any]:
        self._call("offload_chat", chat_id)
        return {"num_offloaded": 7}

    async def forget_cache(self, chat_id: str) -> dict[str, Any]:
        self._call("forget_cache", chat_id)
        return {"num_removed": 12, "num_shared": 3, "is_complete": True}

    async def verify_cache(self) -> AsyncGenerator[dict[str, Any], None]:
        self._call("verify_cache")
        for event in self.verify_events[:-1]:
            yield event
        await self.verify_may_go_on.wait()
        yield self.verify_events[-1]

    async def why_missed(self, chat_id: str | None = None) -> dict[str, Any] | None:
        self._call("why_missed", chat_id)
        return self.why

    async def stop(self) -> bool:
        """The connection ends; the next service is of the app's version."""
        self._call("stop")
        self.version = APP_VERSION
        self._events.put_nowait(_END)
        return True

    def is_same_version(self, status: Mapping[str, Any]) -> bool:
        return bool(status.get("version") == APP_VERSION)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    def _call(self, *call: Any) -> None:
        if self.is_lost:
            raise ServiceLostError
        self.calls.append(call)
        refusal = self.refusals.pop(call[0], None)
        if refusal is not None:
            raise refusal

    def _chat(self, chat_id: str) -> dict[str, Any]:
        if chat_id not in self.chats:
            raise refused("No such chat.", "chat_not_found", 404)
        return self.chats[chat_id]
