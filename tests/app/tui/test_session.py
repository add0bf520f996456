from __future__ import annotations

import asyncio

import pytest
from fake_service import NO_MODEL, FakeService, refused

from chatkv.app.tui.board import Board, MessageAdded, ReplyDone, TextAdded
from chatkv.app.tui.drafts import Drafts
from chatkv.app.tui.ports import RefusedError
from chatkv.app.tui.records import Message
from chatkv.app.tui.refusals import ContextOverflowError, QueuedTurnRefusedError
from chatkv.app.tui.session import Session
from chatkv.app.tui.thread import Shown


def session_with(service: FakeService) -> Session:
    board = Board()
    board.apply({"seq": 0, "type": "hello", "status": service.status()})
    return Session(service, board, Drafts())


async def test_the_first_turn_makes_the_chat_and_shows_both_messages():
    service = FakeService()
    session = session_with(service)
    assert await session.send("hello")
    assert [(message.role, message.content) for message in session.messages] == [("user", "hello"), ("assistant", "")]
    assert session.is_busy
    assert session.chat_id in session.board.chats


async def test_two_turns_at_once_make_one_chat():
    service = FakeService()
    session = session_with(service)
    await asyncio.gather(session.ensure_chat(), session.ensure_chat())
    assert len(service.chats) == 1


async def test_events_that_tell_again_what_is_shown_change_nothing():
    service = FakeService()
    session = session_with(service)
    await session.send("hello")
    assert session.apply(MessageAdded(session.messages[1])) is None
    reply = session.messages[1]
    assert session.apply(TextAdded(reply.id, "Hel", 0)) == Shown("extend", 1, "Hel")
    assert session.apply(TextAdded(reply.id, "Hel", 0)) is None
    assert session.apply(TextAdded(reply.id, "ello", 1)) == Shown("extend", 1, "lo")
    assert session.messages[1].content == "Hello"


async def test_a_hole_in_the_text_is_fetched_again():
    service = FakeService()
    session = session_with(service)
    await session.send("hello")
    assert session.apply(TextAdded(session.messages[1].id, "later", 7)) == Shown("reload")
    assert session.apply(TextAdded("unknown", "x", 0)) == Shown("reload")
    assert session.apply(MessageAdded(Message("z", parent_id="elsewhere"))) == Shown("reload")


async def test_offsets_count_the_stored_text_not_the_shown_one():
    service = FakeService()
    session = session_with(service)
    await session.send("hello")
    reply = session.messages[1].id
    session.apply(TextAdded(reply, "a\x07\x07b", 0))
    assert session.apply(TextAdded(reply, "c", 4)) == Shown("extend", 1, "c")
    assert session.messages[1].content == "abc"


async def test_the_end_of_a_reply_replaces_it():
    service = FakeService()
    session = session_with(service)
    await session.send("hello")
    done = Message(session.messages[1].id, role="assistant", content="whole", status="stopped")
    assert session.apply(ReplyDone(done)) == Shown("replace", 1)
    assert session.messages[1].status == "stopped"


async def test_a_turn_waits_while_the_chat_is_busy_and_goes_out_by_itself():
    service = FakeService()
    session = session_with(service)
    await session.send("one")
    assert not await session.send("two")
    assert session.queued == {session.chat_id: ["two"]}
    assert session.drafts.pending(session.chat_id) == "two", "a queued turn is on disk as the draft"
    assert await session.flush_queue() == []
    session.board.live.clear()
    service.finish(session.chat_id)
    assert await session.flush_queue() == [session.chat_id]
    assert session.queued == {}
    assert [call[2] for call in service.called("send_turn")] == ["one", "two"]


async def test_without_a_model_the_turn_waits_for_it():
    service = FakeService(NO_MODEL)
    session = session_with(service)
    assert not await session.send("hello")
    assert await session.flush_queue() == []
    session.board.apply({"type": "model", "model": {"name": "m", "state": "ready"}})
    assert await session.flush_queue() == [session.chat_id]


async def test_a_queued_turn_that_is_refused_for_good_leaves_the_queue():
    service = FakeService(NO_MODEL)
    session = session_with(service)
    await session.send("hello")
    session.board.apply({"type": "model", "model": {"name": "m", "state": "ready"}})
    service.refusals["send_turn"] = refused("busy", "queue_full", 429)
    assert await session.flush_queue() == []
    assert session.queued == {session.chat_id: ["hello"]}, "that one passes by itself"
    service.refusals["send_turn"] = refused("no such model", "model_not_found", 404)
    with pytest.raises(QueuedTurnRefusedError) as raised:
        await session.flush_queue()
    assert raised.value.text == "hello"
    assert await session.flush_queue() == []


async def test_a_queued_turn_can_be_taken_back():
    service = FakeService(NO_MODEL)
    session = session_with(service)
    await session.send("hello")
    assert session.take_back_queued() == "hello"
    assert session.take_back_queued() is None
    assert session.queued == {}


@pytest.mark.parametrize("code", ["chat_busy", "queue_full"])
async def test_refusals_that_pass_by_themselves_queue_the_turn(code):
    service = FakeService()
    session = session_with(service)
    service.refusals["send_turn"] = refused("later", code, 409)
    assert not await session.send("hello")
    assert session.queued == {session.chat_id: ["hello"]}


async def test_other_refusals_are_raised():
    service = FakeService()
    service.refusals["send_turn"] = refused("bad", "invalid_value")
    with pytest.raises(RefusedError, match="bad"):
        await session_with(service).send("hello")


async def test_a_full_context_becomes_a_choice():
    service = FakeService()
    choice = {"kind": "drop_oldest", "context_start_id": "m5", "num_turns": 4, "num_tokens_after": 900}
    service.refusals["send_turn"] = refused(
        "too long", "context_length_exceeded", n_prompt_tokens=9000, n_ctx=8192, choices=[choice]
    )
    with pytest.raises(ContextOverflowError) as raised:
        await session_with(service).send("hello")
    assert (raised.value.num_prompt_tokens, raised.value.context_tokens) == (9000, 8192)
    assert raised.value.choices[0].context_start_id == "m5"


async def test_an_edit_goes_beside_the_message_even_at_the_root():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"))
    session = session_with(service)
    await session.open_chat(chat_id)
    await session.edit(session.messages[2], "two!")
    assert service.called("send_turn")[-1] == ("send_turn", chat_id, "two!", session.messages[1].id)
    service.finish(chat_id)
    session.board.live.clear()
    await session.edit(session.messages[0], "one!")
    assert service.called("send_turn")[-1] == ("send_turn", chat_id, "one!", None)


async def test_branches_are_switched_by_the_tip():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), ("assistant", "1"))
    reply_id = service.messages[chat_id][-1]["id"]
    service.siblings[chat_id] = {reply_id: ["other", reply_id]}
    session = session_with(service)
    await session.open_chat(chat_id)
    assert await session.switch_branch(session.messages[-1], -1)
    assert ("update_chat", chat_id, {"tip_id": "other"}) in service.calls
    assert not await session.switch_branch(session.messages[-1], 1)


async def test_the_chat_asked_for_last_is_the_one_that_opens():
    service = FakeService()
    slow, fast = service.add_chat("slow", ("user", "a")), service.add_chat("fast", ("user", "b"))
    session = session_with(service)
    answer, get_chat = asyncio.Event(), service.get_chat

    async def held_back(chat_id: str):
        if chat_id == slow:
            await answer.wait()
        return await get_chat(chat_id)

    service.get_chat = held_back
    opening = asyncio.ensure_future(session.open_chat(slow))
    await asyncio.sleep(0)
    assert await session.open_chat(fast)
    answer.set()
    assert not await opening
    assert session.chat_id == session.board.open_chat_id == fast


async def test_a_chat_that_cannot_be_opened_leaves_the_open_one():
    service = FakeService()
    session = session_with(service)
    await session.open_chat(service.add_chat("a"))
    with pytest.raises(RefusedError):
        await session.open_chat("gone")
    assert session.board.open_chat_id == session.chat_id


async def test_what_was_sent_in_a_new_chat_goes_there_though_another_is_open_by_then():
    service = FakeService()
    other = service.add_chat("other", ("user", "q"))
    session = session_with(service)
    key = session.chat_key
    await session.open_chat(other)
    await session.send("hello", key)
    assert service.called("send_turn")[0][1] == session.made_from(key) != other
    assert session.chat_id == other
    assert [message.content for message in session.messages] == ["q"]
