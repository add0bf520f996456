"""Chats and drafts are told to the service before they are asked; nobody hears of it when that fails."""

from __future__ import annotations

import pytest
from fake_service import READY, FakeService, refused
from pilots import main_screen, open_chat, press, running, screen_text, type_text, wait_for, wait_until

from chatkv.app.tui.board import Board
from chatkv.app.tui.drafts import Drafts
from chatkv.app.tui.records import ChatSummary, Conversation
from chatkv.app.tui.session import Session
from chatkv.app.tui.warming import MIN_GROWTH_CHARS, Warmer

LONG = "Please plan three days in Porto for two people with a budget of 600 euros. "


async def test_a_chat_is_warmed_when_it_was_opened_and_one_passed_on_the_way_is_not():
    service = FakeService()
    passed, wanted = service.add_chat("a", ("user", "q")), service.add_chat("b", ("user", "q"), is_private=True)
    async with running(service) as pilot:
        await open_chat(pilot, passed)
        await open_chat(pilot, wanted)
        await wait_until(pilot, lambda: service.called("warm_chat"), "warmed")
        assert service.called("warm_chat") == [("warm_chat", wanted, None)]


async def test_a_chat_that_was_opened_while_its_model_was_loading_is_warmed_when_it_is_ready():
    service = FakeService({**READY, "state": "loading"})
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        main_screen(pilot)._warm_opened()
        await pilot.pause()
        assert not service.called("warm_chat")
        service.set_model(**READY)
        await wait_until(pilot, lambda: service.called("warm_chat"), "warmed")
        assert service.called("warm_chat") == [("warm_chat", chat_id, None)]


async def test_a_growing_draft_is_told_and_one_that_hardly_grew_is_not():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await wait_until(pilot, lambda: service.called("warm_chat"), "warmed")
        await type_text(pilot, LONG)
        await wait_until(pilot, lambda: len(service.called("warm_chat")) == 2, "told")
        chat, draft = service.called("warm_chat")[-1][1:]
        assert chat == chat_id
        assert LONG.startswith(draft.strip())
        assert len(draft) >= MIN_GROWTH_CHARS


async def test_many_keys_are_told_once():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await wait_until(pilot, lambda: service.called("warm_chat"), "warmed")
        for _ in range(4):
            await type_text(pilot, LONG)
            main_screen(pilot).warm_draft_soon()
        await wait_until(pilot, lambda: len(service.called("warm_chat")) == 2, "told")
        assert service.called("warm_chat")[-1][2] == main_screen(pilot).composer.text


async def test_neither_refusals_nor_commands_are_seen():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    service.refusals["warm_chat"] = refused("No model can do that.", "no", 409)
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await wait_until(pilot, lambda: service.called("warm_chat"), "warmed")
        await pilot.pause()
        assert "No model can do that." not in screen_text(pilot.app)
        main_screen(pilot).fill("/system " + LONG)
        main_screen(pilot)._warm_draft()
        await pilot.pause()
        assert len(service.called("warm_chat")) == 1


@pytest.fixture
def session() -> Session:
    board = Board()
    board.apply({"seq": 0, "type": "hello", "status": {"model": READY}})
    session = Session(FakeService(), board, Drafts())
    session.conversation = Conversation(ChatSummary("a"))
    return session


def test_without_a_model_in_memory_or_while_a_reply_is_written_there_is_nothing_to_warm(session):
    warmer = Warmer(session)
    assert warmer.is_possible
    session.board.begin_reply("a", "r")
    assert not warmer.is_possible
    session.board.live.clear()
    session.board.apply({"seq": 1, "type": "model", "model": {"state": "loading"}})
    assert not warmer.is_possible
    session.board.apply({"seq": 2, "type": "model", "model": READY})
    session.begin_new()
    assert not warmer.is_possible


async def test_growth_counts_from_what_was_told_and_in_another_chat_from_nothing(session):
    warmer = Warmer(session)
    assert not warmer.is_worth_telling("short")
    assert warmer.is_worth_telling(LONG)
    await warmer.tell(LONG)
    assert not warmer.is_worth_telling(LONG + "and more")
    assert not warmer.is_worth_telling(LONG[:20]), "a draft that shrinks needs nothing new"
    assert warmer.is_worth_telling(LONG + LONG)
    assert warmer.is_worth_telling("Say: " + LONG), "another beginning is another prompt"
    session.conversation = Conversation(ChatSummary("b"))
    assert warmer.is_worth_telling(LONG)


async def test_a_lost_service_is_no_trouble(session):
    session.service.is_lost = True
    await Warmer(session).tell(None)


async def test_typing_in_a_new_chat_warms_it_once_the_service_knows_it():
    service = FakeService()
    async with running(service) as pilot:
        await type_text(pilot, LONG)
        await wait_until(pilot, lambda: service.called("create_chat"), "its draft was saved")
        await type_text(pilot, LONG)
        await wait_until(pilot, lambda: service.called("warm_chat"), "told")


async def test_the_reply_tells_where_its_prompt_came_from():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await type_text(pilot, "more")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        service.write(chat_id, "text")
        debug = {
            "cached_by_tier": {"device": 1900, "disk": 1044},
            "load": {"is_loaded": True, "load_s": 0.12, "num_loaded_tokens": 1044},
            "miss": None,
        }
        service.finish(chat_id, num_prompt_tokens=3098, num_cached_tokens=2944, prefill_s=0.08, chatkv=debug)
        await wait_for(pilot, "reused 2,944/3,098 tok (95%) device 1,900 disk 1,044 · loaded in ~0.12 s")
