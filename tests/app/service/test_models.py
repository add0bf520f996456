"""Models: which one a request means, waiting for loads, swaps in order, removal."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from chatkv.app.client import RefusedError
from chatkv.app.service.loaded import ModelPlace
from chatkv.app.service.ownership import can_connect
from chatkv.engine.errors import BrokenModelError

from .fake_engine import fake_installed
from .support import FakeModels, Running, running_service, until


async def test_aliases_mean_the_loaded_model_and_unknown_ids_are_404(running: Running) -> None:
    for name in ("", "default", "local", "fake"):
        assert (await running.complete("say hi", model=name)).json()["model"] == "fake"
    refused = await running.complete("say hi", model="gpt-x")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert "fake" in error["message"]


async def test_any_model_by_setting(home: Path) -> None:
    async with running_service(FakeModels(), any_model=True) as running:
        assert (await running.complete("say hi", model="gpt-x")).json()["model"] == "fake"


async def test_the_list_of_models(running: Running) -> None:
    listed = (await running.unix.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
        "fake",
        "model",
        "chatkv",
        4096,
    )
    assert model["created"] == 1767323045
    assert "meta" not in model
    assert (await running.unix.get("/models/fake")).json() == model
    picker = await running.client.list_models()
    assert {"name", "installed", "loaded", "download_bytes", "licence", "fits"} <= set(picker[0])
    assert [entry["name"] for entry in picker if entry["loaded"]] == ["fake"]
    assert any(entry["name"] == "smollm2-135m" and not entry["installed"] for entry in picker)


async def test_health_follows_the_model(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models) as running:
        loading = await running.unix.get("/health")
        assert loading.status_code == 503
        assert loading.json()["error"]["message"] == "Loading model"
        assert "retry-after" in loading.headers
        models.load_gate.set()
        await running.ready()
        assert (await running.unix.get("/v1/health")).json() == {"status": "ok"}


async def test_requests_wait_for_the_first_load(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models) as running:
        answers = [asyncio.create_task(running.complete("say hi")) for _ in range(3)]
        await until(lambda: len(running.service.models._waiters) == 3)
        models.load_gate.set()
        assert [(await answer).status_code for answer in answers] == [200] * 3
        assert len(models.engines) == 1


async def test_a_swap_waits_for_running_answers_and_later_requests_wait_behind_it(home: Path) -> None:
    models = FakeModels(fake_installed("one"), fake_installed("two"))
    async with running_service(models, model="one") as running:
        await running.ready()
        first = models.engines[0]
        first.step_gate.clear()
        running_answer = asyncio.create_task(running.complete("say a", model="one"))
        await until(lambda: first.num_active == 1)
        swapped = asyncio.create_task(running.complete("say b", model="two"))
        await until(lambda: len(running.service.models._waiters) == 1)
        behind = asyncio.create_task(running.complete("say c", model="one"))
        await until(lambda: len(running.service.models._waiters) == 2)
        assert len(models.engines) == 1
        first.step_gate.set()
        assert (await running_answer).json()["model"] == "one"
        assert (await swapped).json()["model"] == "two"
        assert (await behind).json()["model"] == "one"
        assert len(models.engines) == 3


async def test_the_last_used_model_is_remembered(home: Path) -> None:
    models = FakeModels(fake_installed("one"), fake_installed("two"))
    async with running_service(models, model="one") as running:
        await running.ready()
        await running.client.load_model("two")
        await until(lambda: running.service.models.loaded is not None and running.service.models.current_name == "two")
    async with running_service(models, model="one") as running:
        await running.ready()
        assert running.service.models.current_name == "two"


async def test_a_model_that_cannot_be_loaded_says_why_and_can_be_tried_again(home: Path) -> None:
    models = FakeModels()
    models.load_error = BrokenModelError("model.safetensors is damaged. Pull the model again.")
    async with running_service(models) as running:
        await until(lambda: running.service.models.state == "failed")
        status = (await running.client.status())["model"]
        assert status["state"] == "failed"
        assert "damaged" in status["error"]
        refused = await running.complete("say hi")
        assert refused.status_code == 503
        assert "damaged" in refused.json()["error"]["message"]
        models.load_error = None
        assert (await running.complete("say hi")).status_code == 200


async def test_a_damaged_folder_is_a_400(home: Path) -> None:
    models = FakeModels(fake_installed(), fake_installed("bad", problem="config.json is missing"))
    async with running_service(models) as running:
        await running.ready()
        refused = await running.complete("say hi", model="bad")
        assert refused.status_code == 400
        assert "config.json is missing" in refused.json()["error"]["message"]
        assert [model["id"] for model in (await running.unix.get("/v1/models")).json()["data"]] == ["fake"]


async def test_removing_the_loaded_model_needs_force_and_an_idle_model(running: Running) -> None:
    with pytest.raises(RefusedError) as refused:
        await running.client.remove_model("fake")
    assert (refused.value.status, refused.value.code) == (409, "model_loaded")
    running.engine.step_gate.clear()
    answer = asyncio.create_task(running.complete("say hi"))
    await until(lambda: running.engine.num_active == 1)
    with pytest.raises(RefusedError) as refused:
        await running.client.remove_model("fake", is_forced=True)
    assert refused.value.code == "model_busy"
    running.engine.step_gate.set()
    assert (await answer).status_code == 200
    await running.client.remove_model("fake", is_forced=True)
    assert (await running.unix.get("/health")).json() == {"status": "no_model"}
    with pytest.raises(RefusedError) as refused:
        await running.client.remove_model("fake")
    assert refused.value.status == 404


async def test_the_status_says_on_what_the_model_runs_and_why() -> None:
    models = FakeModels(fake_installed())
    models.place = ModelPlace("cuda", "NVIDIA GeForce RTX 4090", "Weights in bf16.", "Of 2 GPUs ...", "An old driver.")
    async with running_service(models) as running:
        await running.ready()
        status = await running.client.status()
    assert status["device"] == "cuda"
    told = {name: status["model"][name] for name in ("card", "plan", "note")}
    assert told == {"card": "NVIDIA GeForce RTX 4090", "plan": "Weights in bf16.", "note": "Of 2 GPUs ..."}
    assert "An old driver." in status["notices"]


async def test_status_and_metrics(running: Running) -> None:
    status = await running.client.status()
    assert status["model"] == {
        "name": "fake",
        "state": "ready",
        "progress": 1.0,
        "error": None,
        "context_tokens": 4096,
        "weight_format": "int4",
        "weights": "int4, as in the model's file",
        "kernels": "native AVX2, 2 threads",
        "card": None,
        "plan": None,
        "note": None,
    }
    assert status["tiers"]["device"]["num_blocks"] == 64
    assert status["url"] is None
    assert Path(status["socket"]) == running.paths.socket_path
    await running.complete("say hi")
    text = (await running.tcp.get("/metrics")).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "chatkv_unused_slot_share",
        "chatkv_batch_size",
    ):
        assert f'\n{name}{{model_name="fake"}}' in text, name
    assert 'chatkv_http_responses_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert "say hi" not in text


async def test_a_pull_of_an_unknown_name_is_refused(running: Running) -> None:
    with pytest.raises(RefusedError) as refused:
        await running.client.pull_model("no-such-model")
    assert refused.value.status == 400
    assert "no-such-model" in refused.value.message
    assert await running.client.list_jobs() == []


async def test_stopping_does_not_wait_for_a_load(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models) as running:
        waiting = asyncio.create_task(running.complete("say hi"))
        await until(lambda: len(running.service.models._waiters) == 1)
        running.service.stop_wanted.set()
        assert (await waiting).status_code == 503
        await until(lambda: running.service.models.state == "no_model")
        assert models.engines == []


async def test_nothing_is_loaded_for_requests_that_come_while_the_service_stops(home: Path) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        await running.service.models.close()
        refused = await running.complete("say hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        running.service._on_pulled("fake")
        assert len(models.engines) == 1


async def test_the_queue_for_a_load_is_bounded(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models, max_num_waiting=2) as running:
        answers = [asyncio.create_task(running.complete("say hi")) for _ in range(2)]
        await until(lambda: len(running.service.models._waiters) == 2)
        refused = await running.complete("say hi")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        models.load_gate.set()
        assert [(await answer).status_code for answer in answers] == [200, 200]


async def test_a_model_that_is_being_removed_is_not_loaded_again_meanwhile(running: Running) -> None:
    models = running.models
    is_removing, may_go_on = threading.Event(), threading.Event()
    remove = models.remove

    def slow(name: str) -> None:
        is_removing.set()
        assert may_go_on.wait(20)
        remove(name)

    models.remove = slow  # type: ignore[method-assign]
    removed = asyncio.create_task(running.client.remove_model("fake", is_forced=True))
    await until(is_removing.is_set)
    late = asyncio.create_task(running.complete("say hi"))
    await until(lambda: len(running.service.models._waiters) == 1)
    may_go_on.set()
    await removed
    assert (await late).status_code == 503
    assert len(models.engines) == 1


async def test_a_pulled_model_takes_the_place_of_one_that_cannot_be_loaded(home: Path) -> None:
    models = FakeModels(fake_installed("one"))
    models.load_error = BrokenModelError("model.safetensors is damaged. Pull the model again.")
    async with running_service(models, model="one") as running:
        await until(lambda: running.service.models.state == "failed")
        models.load_error = None
        models.models["two"] = fake_installed("two")
        running.service._on_pulled("two")
        await running.ready()
        assert running.service.models.current_name == "two"


async def test_a_stopping_service_takes_no_new_client(home: Path) -> None:
    """It would be answered by a service that is about to refuse its first turn; so it starts the next one instead."""
    async with running_service(FakeModels()) as running:
        await running.ready()
        is_stopping, may_go_on = threading.Event(), threading.Event()

        def slow() -> None:
            is_stopping.set()
            assert may_go_on.wait(20)

        running.service.jobs.close = slow  # type: ignore[method-assign,assignment]
        assert can_connect(running.paths.socket_path)
        running.service.stop_wanted.set()
        await until(is_stopping.is_set)
        assert not can_connect(running.paths.socket_path)
        may_go_on.set()


async def test_threads_are_set_while_the_service_runs_and_for_models_that_come(home: Path) -> None:
    models = FakeModels(fake_installed(), fake_installed("other"))
    async with running_service(models) as running:
        await running.ready()
        assert (await running.client.set_threads(5))["kernels"] == "native AVX2, 5 threads"
        models.num_threads = 2
        await running.client.load_model("other")
        await until(lambda: running.service.models.current_name == "other" and running.service.models.loaded)
        assert (await running.client.status())["model"]["kernels"] == "native AVX2, 5 threads"
        refused = await running.unix.post("/chatkv/threads", json={"threads": 0})
        assert refused.status_code == 400
        assert "threads" in refused.json()["error"]["message"]
