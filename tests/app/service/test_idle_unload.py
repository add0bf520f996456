"""B4: a model that nobody uses leaves memory; everything else stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.service.wakeup import Wakeup

from .fake_engine import fake_installed
from .support import FakeModels, running_service, until
from .test_kv_store import talk


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatkv.app.service.service.STATUS_INTERVAL_S", 0.01)


async def test_an_idle_model_is_unloaded_and_the_next_request_brings_it_back(home: Path) -> None:
    models = FakeModels()
    async with running_service(models, idle_unload_s=0.05) as running:
        await running.ready()
        chat_id = await talk(running)
        await until(lambda: running.service.models.state == "unloaded")
        status = (await running.client.status())["model"]
        assert (status["name"], status["state"], status["error"]) == ("fake", "unloaded", None)
        assert (await running.unix.get("/health")).json() == {"status": "unloaded"}
        assert not models.store.tiers[b"fake"].is_open
        assert (await running.client.cache())["model"] is None
        assert (await running.client.warm_chat(chat_id))["reason"] == "model_not_loaded"
        assert len(models.engines) == 1
        await running.client.send_turn(chat_id, "say hi again")
        shown = await running.settled(chat_id)
        assert shown["messages"][-1]["content"] == "hi again"
        assert len(models.engines) == 2


async def test_a_model_at_work_is_not_idle(home: Path) -> None:
    async with running_service(FakeModels(), idle_unload_s=0.03) as running:
        await running.ready()
        chat = await running.client.create_chat()
        await running.client.send_turn(chat["id"], "hold")
        running.service.models._used_at = float("-inf")
        await running.service.models.unload_if_idle(0.03)
        assert running.service.models.state == "ready"
        await running.client.cancel(chat["id"])
        await until(lambda: running.service.models.state == "unloaded")


async def test_a_quiet_service_sleeps_until_somebody_comes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float | None] = []
    wait = Wakeup.wait

    async def noted(self: Wakeup, timeout_s: float | None = None) -> bool:
        if self is running.service._stirred:
            sleeps.append(timeout_s)
        return await wait(self, timeout_s)

    async with running_service(FakeModels(), idle_exit_s=0, idle_unload_s=0) as running:
        monkeypatch.setattr(Wakeup, "wait", noted)
        await running.ready()
        await until(lambda: sleeps and not running.service._stirred._is_set)
        assert sleeps[-1] is None, "nothing is ever due"
        watcher = running.service.events.subscribe()
        async for event in watcher.stream({"type": "hello"}, keep_alive_s=20):
            if b'"type":"status"' in event:
                break
        running.service.events.unsubscribe(watcher)
    sleeps.clear()
    async with running_service(FakeModels(), idle_exit_s=1000, idle_unload_s=500) as running:
        await running.ready()
        await until(lambda: sleeps and running.service.models.loaded)
        await until(lambda: 400 < (sleeps[-1] or 0) <= 500)


async def test_a_request_that_comes_while_it_is_unloaded_waits_and_is_answered(home: Path) -> None:
    models = FakeModels(fake_installed(), fake_installed("other"))
    async with running_service(models) as running:
        await running.ready()
        may_close = asyncio.Event()
        loop = asyncio.get_running_loop()
        really_close = running.engine.close

        def slow() -> None:
            asyncio.run_coroutine_threadsafe(may_close.wait(), loop).result(20)
            really_close()

        running.engine.close = slow  # type: ignore[method-assign]
        unloading = asyncio.create_task(running.service.models.unload_if_idle(0.0))
        await until(lambda: running.service.models.is_unloading)
        answer: Any = asyncio.create_task(running.complete("say hi"))
        await until(lambda: len(running.service.models._waiters) == 1)
        may_close.set()
        assert (await answer).status_code == 200
        await unloading
        assert running.service.models.current_name == "fake"
