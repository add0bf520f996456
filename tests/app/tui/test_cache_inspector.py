"""The cache inspector (F4), what is kept under each chat of the list, and how seldom the service is asked."""

from __future__ import annotations

import time

import pytest
from fake_service import FakeService, cache_state, chain, refused
from pilots import (
    main_screen,
    open_chat,
    press,
    running,
    screen_text,
    type_text,
    wait_for,
    wait_gone,
    wait_until,
)

from chatkv.app.tui.board import Board
from chatkv.app.tui.cache_watch import CacheWatch

SIZES = [(120, 36), (80, 24), (60, 16)]


@pytest.fixture
def service() -> FakeService:
    """Two chats, one on the device and one on disk."""
    service = FakeService()
    now = time.time()
    porto = service.add_chat("Porto", ("user", "where to?"), ("assistant", "to the river"), updated_at=now)
    dune = service.add_chat("Dune", ("user", "who?"), updated_at=now - 10)
    service.cache_state = cache_state(
        chain(porto, "Porto", ("device", 30), last_used_at=now),
        chain(dune, "Dune", ("disk", 300), last_used_at=now - 3600),
        evicts_next=dune,
    )
    return service


def chat(service: FakeService, title: str) -> str:
    return next(chat_id for chat_id, chat in service.chats.items() if chat["title"] == title)


@pytest.mark.parametrize("size", SIZES)
async def test_it_shows_tiers_chains_and_what_goes_next_at_every_size(service, size):
    async with running(service, size) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "KV cache", "smollm2-135m", "pool", "1.9/2.2 GB", "Porto", "Dune", "4,803")
        text = screen_text(pilot.app)
        assert ("resume" in text.split("tokens")[1]) is (size[0] >= 80)
        if size[1] > 16:
            await wait_for(pilot, "sorted by last use   evicts next: Dune")


async def test_enter_opens_the_chat_under_the_bar(service):
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "down", "enter")
        await wait_until(pilot, lambda: pilot.app.session.chat_id == chat(service, "Dune"), "opened")
        assert pilot.app.screen is main_screen(pilot)


async def test_keys_act_on_the_chain_under_the_bar(service):
    dune = chat(service, "Dune")
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "down", "p")
        await wait_for(pilot, "Dune is pinned")
        assert ("update_chat", dune, {"is_pinned": True}) in service.calls
        await press(pilot, "w")
        await wait_until(pilot, lambda: ("warm_chat", dune, None) in service.calls, "warmed")
        await press(pilot, "o")
        await wait_for(pilot, "7 blocks left the device")
        service.cache_state["evicts_next"] = None
        pilot.app.screen._refresh()
        await wait_until(pilot, lambda: not pilot.app.session.cache.report.evicts_next, "drawn again")
        await pilot.pause()
        assert "7 blocks left the device" in screen_text(pilot.app)
        assert service.called("offload_chat") == [("offload_chat", dune)]
        await press(pilot, "s")
        await wait_for(pilot, "sorted by tokens")


async def test_dropping_asks_and_keeps_asking_about_another_chain(service):
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "x")
        await wait_for(pilot, "x again drops what is kept of “Porto”; its text stays.")
        await press(pilot, "down", "x")
        await wait_for(pilot, "x again drops what is kept of “Dune”")
        assert not service.called("forget_cache")
        await press(pilot, "x")
        await wait_for(pilot, "12 cached blocks are gone; 3 stay, since other chats begin with them.")
        assert service.called("forget_cache") == [("forget_cache", chat(service, "Dune"))]


async def test_verify_shows_how_far_it_is_and_what_it_found(service):
    service.verify_events = [
        {"type": "progress", "num_checked": 1500, "num_blocks": 6000},
        {"type": "done", "num_checked": 6000, "num_damaged": 2},
    ]
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "v")
        await wait_for(pilot, "▓▓▓▓░░░░░░░░░░░░ 1,500/6,000 blocks read   v stops")
        service.verify_may_go_on.set()
        await wait_for(pilot, "6,000 blocks read: 2 damaged, removed")


async def test_verify_can_be_stopped(service):
    service.verify_events = [{"type": "progress", "num_checked": 1, "num_blocks": 6000}, {"type": "done"}]
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "v")
        await wait_for(pilot, "v stops")
        await press(pilot, "v")
        await wait_for(pilot, "Reading the store was stopped.")
        await press(pilot, "v")
        await wait_until(pilot, lambda: len(service.called("verify_cache")) == 2, "and begun again")


async def test_why_a_prompt_was_computed_is_said_in_words(service):
    miss = {"position": 412, "text_before": "for two, budget", "text": " 700", "expected_text": " 600"}
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "y")
        await wait_for(pilot, "Porto: nothing was asked since the start")
        service.why = {"num_prompt_tokens": 483, "num_cached_tokens": 470, "num_recomputed_tokens": 0, "miss": miss}
        await press(pilot, "y")
        await wait_for(pilot, "Porto: only its new text was computed: 13 of 483 tokens")
        service.why |= {"num_cached_tokens": 400, "num_recomputed_tokens": 80}
        await press(pilot, "y")
        await wait_for(pilot, "differs from token 412 on after “…for two, budget”: “ 700”, where “ 600” is kept")


async def test_what_cannot_be_warmed_says_why(service):
    service.warm_reason = "model_not_loaded"
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "w")
        await wait_for(pilot, "Its model is not loaded.")


async def test_a_refusal_is_said_where_the_key_was_pressed(service):
    service.refusals["offload_chat"] = refused("No lower tier holds this chat.", "no_lower_tier", 409)
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803")
        await press(pilot, "o")
        await wait_for(pilot, "No lower tier holds this chat.")


async def test_a_store_that_keeps_nothing_is_named(service):
    service.cache_state["tiers"]["disk"] = {"state": "memory_only", "notice": "The store belongs to another home."}
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "memory only", "The store belongs to another home.")


async def test_nothing_kept_and_no_model_are_no_empty_frame():
    service = FakeService()
    service.cache_state = {"model": None, "chats": []}
    async with running(service) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "no model is loaded", "disk  off")


async def test_plain_ascii_on_request(service):
    async with running(service, is_ascii=True) as pilot:
        await press(pilot, "f4")
        await wait_for(pilot, "4,803", "----")
        assert not set("█▓░▾├└★○") & set(screen_text(pilot.app))


async def test_the_list_says_what_is_kept_of_each_chat_and_what_that_saves(service):
    async with running(service) as pilot:
        await wait_for(pilot, "████████ pool", "483 tok", "░░░░░░░░ disk", "resume ~0.9 s (else 15 s)", "11/40 GB")
        await press(pilot, "ctrl+o", "down", "enter")
        await wait_until(pilot, lambda: pilot.app.session.chat_id == chat(service, "Dune"), "lines are no stops")
        await press(pilot, "ctrl+o", "/")
        await type_text(pilot, "dune")
        await wait_gone(pilot, "Porto")
        assert "resume" not in screen_text(pilot.app), "a search shows titles"


async def test_a_click_on_the_lines_under_a_chat_opens_it(service):
    async with running(service) as pilot:
        await wait_for(pilot, "░░░░░░░░ disk")
        rows = main_screen(pilot).chat_list.rows
        index = next(index for index, row in enumerate(rows) if row.label.startswith("resume"))
        await pilot.click("#chats", offset=(6, index))
        await wait_until(pilot, lambda: pilot.app.session.chat_id == chat(service, "Dune"), "opened")


async def test_the_service_is_asked_only_when_something_happened_and_the_list_is_seen(service):
    async with running(service) as pilot:
        screen, watch = main_screen(pilot), pilot.app.session.cache
        await wait_until(pilot, lambda: not watch.is_due, "settled")
        num_calls = len(service.called("cache"))
        for _ in range(5):
            screen.watch_cache()
            await pilot.pause()
        assert len(service.called("cache")) == num_calls, "nothing happened"
        service.emit_status(batch_size=1)
        await wait_until(pilot, lambda: watch.is_due, "heard")
        await press(pilot, "f6")
        screen.watch_cache()
        await pilot.pause()
        assert len(service.called("cache")) == num_calls, "nobody looks"
        await press(pilot, "f6")
        await wait_until(pilot, lambda: len(service.called("cache")) > num_calls, "now somebody does")


def board_that_hears(**status) -> Board:
    board = Board()
    board.apply({"seq": 0, "type": "hello", "status": {"model": {"state": "ready"}, **status}})
    return board


async def test_a_watch_goes_on_until_two_answers_are_the_same():
    service, board = FakeService(), board_that_hears()
    watch = CacheWatch(service, board)
    assert watch.is_due
    assert await watch.ask()
    assert watch.is_due, "blocks may still be on their way to the disk"
    service.cache_state["tiers"]["disk"]["num_queued"] = 5
    await watch.ask()
    assert not await watch.ask()
    assert watch.is_due, "they are"
    service.cache_state["tiers"]["disk"]["num_queued"] = 0
    await watch.ask()
    await watch.ask()
    assert not watch.is_due
    board.apply({"seq": 1, "type": "status", "status": {"model": {"state": "ready"}}})
    assert not watch.is_due, "a status that tells nothing new"
    board.apply({"seq": 2, "type": "reply_done", "chat_id": "a", "message": {"id": "r"}})
    assert watch.is_due


async def test_without_an_answer_the_last_report_stays_and_the_service_is_left_alone():
    service, board = FakeService(), board_that_hears()
    watch = CacheWatch(service, board)
    await watch.ask()
    report = watch.report
    service.refusals["cache"] = refused("busy", "busy", 503)
    assert not await watch.ask()
    assert watch.report is report
    assert watch.trouble == "busy"
    assert not watch.is_due
    board.disconnect()
    board.num_cache_changes += 1
    assert not watch.is_due


async def test_deleting_a_chat_tells_what_became_of_its_cache(service):
    async with running(service) as pilot:
        await open_chat(pilot, chat(service, "Dune"))
        main_screen(pilot).action_delete_chat()
        await wait_for(pilot, "Deleted “Dune”", "12 cached blocks are")
