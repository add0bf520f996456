"""Warm before asked: opened chats, drafts, the next turn. It gives way to everything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chatkv.app.service.chat_prompt import settled_part
from chatkv.engine.request import GenerationRequest, Priority, WarmMode

from .fake_engine import ASSISTANT, END, USER, FakeText, encode, fake_installed
from .support import FakeModels, Running, running_service, until
from .test_kv_store import talk

LONG = "tell me of all the ships that went down in the great storm of"


@pytest.fixture
async def quick(running: Running) -> AsyncIterator[Running]:
    """Drafts are looked at as often as they come."""
    running.service.warmer._draft_interval_s = 0.0
    yield running
    running.engine.warm_gate.set()


def warm_text(request: GenerationRequest) -> str:
    return FakeText().decode(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("draft", "settled"),
    [
        ("", ""),
        ("one", ""),
        ("one two", "one"),
        ("one two ", "one two"),
        ("one  \n two thr", "one  \n two"),
        (" one", ""),
        ("   ", ""),
        ("船" * 100, "船" * 68),
        ("say " + "船" * 100, "say " + "船" * 68),
    ],
)
def test_the_word_that_is_being_typed_is_left_out(draft: str, settled: str) -> None:
    assert settled_part(draft) == settled


async def test_after_a_turn_what_the_next_one_needs_is_computed(running: Running) -> None:
    """A6"""
    chat_id = await talk(running)
    (request,) = running.engine.warm_requests
    assert (request.warm, request.priority, request.owner) == (WarmMode.COMPUTE, Priority.BACKGROUND, chat_id)
    assert not request.is_transient
    turn = running.engine.requests[-1]
    answer = tuple(encode("a text of more than sixteen tokens"))
    assert request.prompt_token_ids == (*turn.prompt_token_ids, *answer, END, USER)
    (shown,) = (await running.client.cache())["chats"]
    assert shown["num_tokens"] == len(request.prompt_token_ids)


async def test_opening_a_chat_loads_it(running: Running) -> None:
    chat_id = await talk(running)
    assert await running.client.warm_chat(chat_id) == {"is_started": True, "reason": None}
    await until(lambda: len(running.engine.warm_requests) == 2)
    next_turn, opened = running.engine.warm_requests
    assert opened.warm is WarmMode.LOAD
    assert not opened.is_transient
    assert opened.prompt_token_ids == next_turn.prompt_token_ids


async def test_a_draft_is_computed_as_far_as_it_is_settled_and_kept_nowhere(quick: Running) -> None:
    chat_id = await talk(quick)
    stored = set(quick.models.store.tiers[b"fake"].hashes)
    await quick.client.warm_chat(chat_id, f"{LONG} nineteen")
    await until(lambda: len(quick.engine.warm_requests) == 2)
    await until(lambda: not quick.service.warmer.is_warming(chat_id))
    request = quick.engine.warm_requests[-1]
    assert (request.warm, request.is_transient, request.owner) == (WarmMode.COMPUTE, True, chat_id)
    assert warm_text(request).endswith(LONG)
    await quick.client.send_turn(chat_id, f"{LONG} nineteen")
    await quick.settled(chat_id)
    sent = quick.engine.requests[-1].prompt_token_ids
    assert sent[: len(request.prompt_token_ids)] == request.prompt_token_ids
    assert ASSISTANT not in request.prompt_token_ids[-len(LONG) :]
    assert stored < quick.models.store.tiers[b"fake"].hashes, "the turn itself is stored"


async def test_nothing_of_an_unsent_draft_is_stored(quick: Running) -> None:
    chat_id = await talk(quick)
    stored = set(quick.models.store.tiers[b"fake"].hashes)
    await quick.client.warm_chat(chat_id, f"{LONG} nineteen")
    await until(lambda: len(quick.engine.warm_requests) == 2)
    await until(lambda: not quick.service.warmer.is_warming(chat_id))
    assert quick.models.store.tiers[b"fake"].hashes == stored
    owned = await quick.service.chats.run(lambda store: store.owned_blocks(chat_id))
    assert owned[b"fake"].owned == stored
    await quick.client.delete_chat(chat_id)
    assert not quick.engine.engine.device, "a draft's blocks outlived their chat"


async def test_a_draft_that_grows_cancels_the_request_for_the_shorter_one(quick: Running) -> None:
    chat = await quick.client.create_chat()
    quick.engine.warm_gate.clear()
    await quick.client.warm_chat(chat["id"], f"{LONG} ")
    await until(lambda: quick.engine.num_active == 1)
    await quick.client.warm_chat(chat["id"], f"{LONG} n")  # No further block: the request goes on.
    await quick.client.warm_chat(chat["id"], f"{LONG} nineteen hundred and")
    await until(lambda: len(quick.engine.warm_requests) == 2 and quick.engine.num_active == 1)
    assert warm_text(quick.engine.warm_requests[-1]).endswith("nineteen hundred")


async def test_fast_typing_costs_few_requests(running: Running) -> None:
    chat = await running.client.create_chat()
    running.service.warmer._draft_interval_s = 0.1
    started = asyncio.get_running_loop().time()
    for end in range(1, len(LONG)):
        await running.client.warm_chat(chat["id"], LONG[:end])
    await until(lambda: not running.service.warmer.is_warming(chat["id"]))
    taken = asyncio.get_running_loop().time() - started
    assert 1 <= len(running.engine.warm_requests) <= taken / 0.1 + 1
    assert warm_text(running.engine.warm_requests[-1]).endswith("great storm")


async def test_a_turn_ends_the_work_in_advance_and_is_not_held_up(quick: Running) -> None:
    chat = await quick.client.create_chat()
    quick.engine.warm_gate.clear()
    await quick.client.warm_chat(chat["id"], f"{LONG} nineteen")
    await until(lambda: quick.engine.num_active == 1)
    await quick.client.send_turn(chat["id"], "hold")
    await until(lambda: [r.request.warm for r in quick.engine._running] == [None])
    assert await quick.client.warm_chat(chat["id"], "more ") == {"is_started": False, "reason": "chat_busy"}
    await quick.client.cancel(chat["id"])
    await quick.settled(chat["id"])


async def test_a_load_goes_on_when_the_turn_comes(quick: Running) -> None:
    chat_id = await talk(quick)
    quick.engine.warm_gate.clear()
    await quick.client.warm_chat(chat_id)
    await until(lambda: quick.engine.num_active == 1)
    await quick.client.send_turn(chat_id, "hold")
    await until(lambda: [r.request.warm for r in quick.engine._running] == [WarmMode.LOAD, None])
    await quick.client.cancel(chat_id)
    await quick.settled(chat_id)


async def test_it_never_loads_or_swaps_a_model(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(), fake_installed("other"))) as running:
        await running.ready()
        chat = await running.client.create_chat(model="other")
        gone = await running.client.create_chat(model="never-installed")
        for chat_id in (chat["id"], gone["id"]):
            answer = await running.client.warm_chat(chat_id, f"{LONG} nineteen")
            assert answer == {"is_started": False, "reason": "model_not_loaded"}
        assert running.service.models.current_name == "fake"
        assert running.engine.warm_requests == []


async def test_it_is_no_activity_and_no_use_of_the_model(quick: Running) -> None:
    chat = await quick.client.create_chat()
    quick.engine.warm_gate.clear()
    used_at, last = quick.service.models._used_at, quick.service.activity._last
    await quick.client.warm_chat(chat["id"], f"{LONG} nineteen")
    await until(lambda: quick.engine.num_active == 1)
    assert (quick.service.models._used_at, quick.service.activity._last) == (used_at, last)
    assert not quick.service.is_working


async def test_a_swap_ends_it(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(), fake_installed("other"))) as running:
        await running.ready()
        chat = await running.client.create_chat(model="fake")
        running.engine.warm_gate.clear()
        await running.client.warm_chat(chat["id"], f"{LONG} nineteen")
        await until(lambda: running.engine.num_active == 1)
        assert (await running.complete("say hi", model="other")).status_code == 200
        await until(lambda: not running.service.warmer.is_warming(chat["id"]))


async def test_chats_that_cannot_be_warmed_are_let_be(quick: Running) -> None:
    chat = await quick.client.create_chat()
    await quick.client.warm_chat(chat["id"], "x " * 5000)  # Longer than the context.
    await until(lambda: not quick.service.warmer.is_warming(chat["id"]))
    assert quick.engine.warm_requests == []
    await quick.client.warm_chat(chat["id"], "template refuses now")
    await until(lambda: not quick.service.warmer.is_warming(chat["id"]))
    await quick.client.delete_chat(chat["id"])
    assert (await quick.client.warm_chat(chat["id"]))["reason"] == "in_trash"


async def test_forgetting_waits_for_work_in_advance_to_end(quick: Running) -> None:
    chat_id = await talk(quick)
    quick.engine.warm_gate.clear()
    await quick.client.warm_chat(chat_id, f"{LONG} nineteen")
    await until(lambda: quick.engine.num_active == 1)
    await asyncio.wait_for(quick.client.delete_chat(chat_id), 10)
    assert quick.engine.num_active == 0
    assert not quick.engine.engine.device
